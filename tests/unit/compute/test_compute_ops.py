"""Ops of the torch backend against the float64 oracle."""

import compute_oracle as oracle
import numpy as np
import pytest

from halogen_core.spi import (
    Activation,
    AttentionSpec,
    BackendOptions,
    KVSpec,
    MoESpec,
    QuantTensor,
    RopeSpec,
    RopeStyle,
    TorchBackend,
    WeightRole,
)
from halogen_core.spi.testing import OpaqueBackend, Share, f32_tensor, step_batch

BACKENDS = {
    "torch": TorchBackend,
    "invariant": lambda: TorchBackend(BackendOptions(deterministic=True)),
    "opaque": OpaqueBackend,
}
BLOCK = 8


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request):
    return BACKENDS[request.param]()


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def pack(backend, values, role=WeightRole.LINEAR):
    return backend.pack([f32_tensor("w", values)], role)


def close(got, want, tolerance=2e-5):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(
        got, want, rtol=tolerance, atol=tolerance * np.abs(want).max(initial=1)
    )


def rope(dim, style=RopeStyle.NEOX, factor=1.0):
    frequencies = tuple(float(10000 ** (-2 * i / dim)) for i in range(dim // 2))
    return RopeSpec(dim=dim, inv_freq=frequencies, style=style, attention_factor=factor)


def attention_spec(**changes):
    fields = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25}
    return AttentionSpec(**{**fields, **changes})


@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_embed_norm_add_linear(backend, rng, tokens):
    table, weight, bias = normal(rng, 50, 24), normal(rng, 24), normal(rng, 33)
    ids = rng.integers(0, 50, tokens).astype(np.int32)
    embedded = backend.ops.embed(
        backend.upload(ids), pack(backend, table, WeightRole.EMBEDDING), scale=1.5
    )
    close(backend.download(embedded), table[ids] * 1.5)
    x, y = normal(rng, tokens, 24), normal(rng, tokens, 24)
    norm = pack(backend, weight, WeightRole.NORM)
    close(
        backend.download(backend.ops.rms_norm(backend.upload(x), norm, eps=1e-5)),
        oracle.rms_norm(x, weight, 1e-5),
    )
    normed, total = backend.ops.add_rms_norm(backend.upload(x), backend.upload(y), norm, eps=1e-5)
    close(backend.download(total), x + y)
    close(backend.download(normed), oracle.rms_norm(x + y, weight, 1e-5))
    matrices = [f32_tensor("a", normal(rng, 20, 24)), f32_tensor("b", normal(rng, 13, 24))]
    both = backend.pack(matrices, WeightRole.LINEAR)
    assert both.parts == (20, 13)
    assert both.shape == (33, 24)
    stacked = np.concatenate([m.data.view(np.float32).reshape(m.shape) for m in matrices])
    close(backend.unpack(both), stacked, 0)
    out = backend.ops.linear(backend.upload(x), both, bias=pack(backend, bias, WeightRole.BIAS))
    close(backend.download(out), x.astype(np.float64) @ stacked.T + bias)


@pytest.mark.parametrize("kind", list(Activation))
def test_gated_act_and_mlp(backend, rng, kind):
    x = 4 * normal(rng, 5, 2 * 21)
    close(backend.download(backend.ops.gated_act(backend.upload(x), kind)), oracle.act(x, kind))
    x, gate_up, down = normal(rng, 5, 24), normal(rng, 42, 24) / 4, normal(rng, 24, 21) / 4
    got = backend.ops.mlp(backend.upload(x), pack(backend, gate_up), pack(backend, down), kind)
    inner = oracle.act(x.astype(np.float64) @ gate_up.T, kind)
    close(backend.download(got), inner @ down.T)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_moe(backend, rng, gating, normalize):
    spec = MoESpec(
        num_experts=7, top_k=3, gating=gating, normalize_top_k=normalize, weight_scale=1.5
    )
    # whole numbers, so that equal experts have exactly equal scores: the lower goes first
    router, down = rng.integers(-1, 2, (7, 24)).astype(np.float32), normal(rng, 7, 24, 10)
    router[5] = router[2]
    gate_up, x = normal(rng, 7, 20, 24) / 4, rng.integers(-1, 2, (19, 24)).astype(np.float32)
    got = backend.ops.moe(
        backend.upload(x),
        pack(backend, router),
        pack(backend, gate_up, WeightRole.EXPERTS),
        pack(backend, down, WeightRole.EXPERTS),
        spec,
    )
    close(backend.download(got), oracle.moe(x, router, gate_up, down, spec))


def test_moe_parts_are_stacked_per_expert(backend, rng):
    gate, up = normal(rng, 3, 5, 8), normal(rng, 3, 5, 8)
    both = backend.pack([f32_tensor("g", gate), f32_tensor("u", up)], WeightRole.EXPERTS)
    assert both.shape == (3, 10, 8)
    close(backend.unpack(both), np.concatenate([gate, up], axis=1), 0)


def test_logits_scale_and_softcap(backend, rng):
    x, weight = normal(rng, 4, 24), normal(rng, 40, 24)
    got = backend.ops.logits(backend.upload(x), pack(backend, weight), scale=0.5, softcap=3.0)
    close(backend.download(got), 3 * np.tanh(x.astype(np.float64) @ weight.T * 0.5 / 3))


class Paged:
    """A few sequences in a shuffled pool, with what they should hold beside it."""

    def __init__(self, backend, spec, kv_dtype="f32", seed=3):
        self.backend, self.spec = backend, spec
        layout = backend.kv_layout(
            KVSpec(
                num_layers=2,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                dtype=kv_dtype,
                block_size=BLOCK,
            )
        )
        self.kv = backend.kv_alloc(layout, 24)
        self.rng = np.random.default_rng(seed)
        self.free = list(self.rng.permutation(24))
        self.sequences = []

    def add(self):
        self.sequences.append({"blocks": [], "q": [], "k": [], "v": [], "n": 0})

    def step(self, counts, q_norm=None, k_norm=None, sinks=None):
        """Run counts[i] more tokens of each sequence through; returns (got, want) per sequence."""
        spec, shares, rows = self.spec, [], []
        heads = spec.num_heads + 2 * spec.num_kv_heads
        for sequence, count in zip(self.sequences, counts, strict=True):
            while len(sequence["blocks"]) * BLOCK < sequence["n"] + count:
                sequence["blocks"].append(int(self.free.pop()))
            shares.append(
                Share(tokens=(0,) * count, blocks=tuple(sequence["blocks"]), start=sequence["n"])
            )
            rows.append(normal(self.rng, count, heads, spec.head_dim))
        qkv = np.concatenate([normal(self.rng, 0, heads, spec.head_dim), *rows])
        qkv = qkv.reshape(sum(counts), heads * spec.head_dim)
        meta = self.backend.upload_step(step_batch(shares, BLOCK))
        device, norms = self.backend.upload(qkv), {}
        if q_norm is not None:
            norms = {
                "q_norm": pack(self.backend, q_norm, WeightRole.NORM),
                "k_norm": pack(self.backend, k_norm, WeightRole.NORM),
            }
        ops = self.backend.ops
        q = ops.qkv_rope_store(device, self.kv, 1, meta, spec, **norms)
        np.testing.assert_array_equal(self.backend.download(device), qkv)
        packed = None if sinks is None else pack(self.backend, sinks, WeightRole.SINKS)
        out = self.backend.download(ops.attention(q, self.kv, 1, meta, spec, sinks=packed))
        return self._compare(counts, rows, out, q_norm, k_norm, sinks)

    def _compare(self, counts, rows, out, q_norm, k_norm, sinks):
        spec, at, pairs = self.spec, 0, []
        for sequence, count, heads in zip(self.sequences, counts, rows, strict=True):
            q, k, v = np.split(
                heads.astype(np.float64),
                [spec.num_heads, spec.num_heads + spec.num_kv_heads],
                axis=1,
            )
            if q_norm is not None:
                q = oracle.rms_norm(q, q_norm, spec.norm_eps)
                k = oracle.rms_norm(k, k_norm, spec.norm_eps)
            first = sequence["n"]
            if spec.rope:
                q, k = (
                    np.array(
                        [
                            [oracle.rotate(h, first + i, spec.rope) for h in t]
                            for i, t in enumerate(x)
                        ]
                    ).reshape(x.shape)
                    for x in (q, k)
                )
            sequence["k"].extend(k)
            sequence["v"].extend(v)
            sequence["n"] += count
            if count:
                want = oracle.attention(q, sequence["k"], sequence["v"], spec, first, sinks)
                pairs.append((out[at : at + count], want.reshape(count, -1)))
            at += count
        return pairs


SPECS = {
    "plain": attention_spec(),
    "mha": attention_spec(num_kv_heads=6),
    "mqa": attention_spec(num_kv_heads=1),
    "window": attention_spec(window=5),
    "wide window": attention_spec(window=19),
    "softcap": attention_spec(softcap=1.5),
    "neox": attention_spec(rope=rope(16)),
    "interleaved": attention_spec(rope=rope(16, RopeStyle.INTERLEAVED)),
    "partial": attention_spec(rope=rope(8, factor=1.3)),
    "partial interleaved": attention_spec(rope=rope(4, RopeStyle.INTERLEAVED)),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_mixed_steps(backend, rng, name, sinks):
    """Prefill, decode and mixed steps over shuffled block tables."""
    paged = Paged(backend, SPECS[name])
    for _ in range(4):
        paged.add()
    values = normal(rng, 6) if sinks else None
    for counts in ([9, 1, 0, 30], [1, 1, 1, 1], [1, 7, 8, 1], [1, 1, 1, 1], [0, 3, 1, 2]):
        for got, want in paged.step(counts, sinks=values):
            close(got, want)


def test_qk_norm(backend, rng):
    paged = Paged(backend, attention_spec(rope=rope(16), norm_eps=1e-3))
    paged.add()
    norms = normal(rng, 16), normal(rng, 16)
    for counts in ([11], [1], [4]):
        for got, want in paged.step(counts, *norms):
            close(got, want)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("f16", 2e-3), ("bf16", 1e-2), ("f8_e5m2", 0.15), ("q8_0", 1e-2)]
)
def test_kv_storage_types(backend, dtype, tolerance):
    paged = Paged(backend, attention_spec(head_dim=32, scale=0.18, rope=rope(32)), dtype)
    paged.add()
    paged.add()
    for counts in ([9, 1], [1, 1], [3, 12]):
        for got, want in paged.step(counts):
            close(got, want, tolerance)


def test_stale_nans_do_not_leak(backend):
    """A slot that no token of the sequence wrote may hold anything."""
    paged = Paged(backend, attention_spec())
    shape = backend.kv_export(paged.kv, [0]).data.shape
    poison = np.full((24, *shape[1:]), 0xFF, np.uint8)
    from halogen_core.spi import KVBlocks

    backend.kv_import(paged.kv, list(range(24)), KVBlocks(spec=paged.kv.layout.spec, data=poison))
    for _ in range(3):
        paged.add()
    for counts in ([3, 9, 1], [1, 1, 1]):
        for got, want in paged.step(counts):
            close(got, want)


def test_empty_step(backend):
    paged = Paged(backend, attention_spec(rope=rope(16)))
    assert paged.step([]) == []


def test_quantised_weights_are_what_unpack_says(backend, rng):
    from gguf import GGMLQuantizationType, quants

    values = normal(rng, 12, 64)
    data = quants.quantize(values, GGMLQuantizationType.Q5_0)
    part = QuantTensor(format="Q5_0", shape=(12, 64), data=data.reshape(-1))
    want = quants.dequantize(data, GGMLQuantizationType.Q5_0)
    for role in (WeightRole.LINEAR, WeightRole.EMBEDDING):
        np.testing.assert_array_equal(backend.unpack(backend.pack([part], role)), want)
    ids = np.array([3, 11, 3], np.int32)
    table = backend.pack([part], WeightRole.EMBEDDING)
    got = backend.download(backend.ops.embed(backend.upload(ids), table))
    np.testing.assert_array_equal(got, want[ids])
