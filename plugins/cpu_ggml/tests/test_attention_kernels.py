"""Rotary store and paged attention against float64, over sequences cut in every way."""

import numpy as np
import pytest
from ggml_cases import backend_for, relative, shuffled_tables, step_batch, vector

from halogen_core.spi import AttentionSpec, KVSpec, RopeSpec, RopeStyle, WeightRole

TOLERANCE = {"f32": 2e-6, "f16": 1e-3, "bf16": 8e-3, "q8_0": 1.5e-2, "f8_e5m2": 0.1}


def spec_of(hq=4, hkv=2, d=64, **changes):
    style = changes.pop("style", RopeStyle.NEOX)
    dim = changes.pop("rope_dim", d)
    inv = tuple(10000.0 ** (-2 * i / dim) for i in range(dim // 2))
    rope = RopeSpec(dim=dim, inv_freq=inv, style=style, attention_factor=1.0)
    values = {"num_heads": hq, "num_kv_heads": hkv, "head_dim": d, "scale": d**-0.5, "rope": rope}
    return AttentionSpec(**{**values, **changes})


def rotated(x, positions, rope):
    """x [T, H, D] float64."""
    if rope is None:
        return x
    angle = positions[:, None] * np.array(rope.inv_freq)
    cos, sin = (f(angle)[:, None] * rope.attention_factor for f in (np.cos, np.sin))
    out, half = x.copy(), rope.dim // 2
    if rope.style is RopeStyle.NEOX:
        a, b = x[..., :half], x[..., half : rope.dim]
        out[..., :half], out[..., half : rope.dim] = a * cos - b * sin, a * sin + b * cos
    else:
        a, b = x[..., 0 : rope.dim : 2], x[..., 1 : rope.dim : 2]
        out[..., 0 : rope.dim : 2] = a * cos - b * sin
        out[..., 1 : rope.dim : 2] = a * sin + b * cos
    return out


def oracle(q, k, v, spec, sinks=None):
    """The last len(q) positions of one sequence, float64 [n, Hq, D]."""
    n, length = len(q), len(k)
    group = spec.num_heads // spec.num_kv_heads
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    position, key = np.arange(length - n, length)[:, None], np.arange(length)
    seen = key <= position
    if spec.window:
        seen &= key > position - spec.window
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    return np.einsum("hqk,khd->qhd", weights / total, v)


class Case:
    """Random QKV of several sequences, stored and attended to step by step."""

    def __init__(self, backend, spec, sequences, dtype="f32", block_size=16, seed=0):
        self.rng = rng = np.random.default_rng(seed)
        self.backend, self.spec = backend, spec
        self.sequences = sequences
        self.tables, blocks = shuffled_tables(rng, sequences, block_size)
        self.block_size = block_size
        kv_spec = KVSpec(
            num_layers=2,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            block_size=block_size,
        )
        self.kv = backend.kv_alloc(backend.kv_layout(kv_spec), blocks)
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = [rng.standard_normal((n, width), dtype=np.float32) for _, n in sequences]

    def store(self, cut, **weights):
        """A step of positions cut[s][0] .. cut[s][1] - 1 of each sequence: its KV is kept."""
        sequences = [(hi - lo, hi) for lo, hi in cut]
        batch = step_batch(sequences, self.tables, self.block_size)
        qkv = np.concatenate([x[lo:hi] for x, (lo, hi) in zip(self.qkv, cut, strict=True)])
        meta, ops = self.backend.upload_step(batch), self.backend.ops
        qkv = self.backend.upload(qkv)
        return meta, ops.qkv_rope_store(qkv, self.kv, 1, meta, self.spec, **weights)

    def run(self, cut, sinks=None, **weights):
        """The same step with its attention: [n, Hq, D] of each sequence."""
        meta, q = self.store(cut, **weights)
        out = self.backend.ops.attention(q, self.kv, 1, meta, self.spec, sinks=sinks)
        out = self.backend.download(out).reshape(-1, self.spec.num_heads, self.spec.head_dim)
        return np.split(out, meta.host.query_start_loc[1:-1])

    def whole(self):
        """Prompts but for the last tokens are stored, then the steps of `sequences`."""
        self.store([(0, length - n) for n, length in self.sequences])
        return self.run([(length - n, length) for n, length in self.sequences])

    def expected(self, norms=(None, None), sinks=None):
        results = []
        s = self.spec
        for (n, length), qkv in zip(self.sequences, self.qkv, strict=True):
            heads = qkv.astype(np.float64).reshape(length, -1, s.head_dim)
            q, k, v = np.split(heads, [s.num_heads, s.num_heads + s.num_kv_heads], axis=1)
            q, k = (self._normed(x, w) for x, w in zip((q, k), norms, strict=True))
            q, k = (rotated(x, np.arange(length), s.rope) for x in (q, k))
            results.append(oracle(q[-n:], k, v, s, sinks))
        return results

    def _normed(self, x, weight):
        if weight is None:
            return x
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.spec.norm_eps) * weight


SHAPES = {
    "gqa3": spec_of(9, 3, 64, style=RopeStyle.INTERLEAVED),
    "mha": spec_of(4, 4, 32),
    "mqa16": spec_of(16, 1, 48),
    "d80": spec_of(6, 2, 80),
    "d256": spec_of(4, 1, 256),
    "gqa7": spec_of(14, 2, 64),
    "partial": spec_of(4, 2, 64, rope_dim=32),
    "norope": spec_of(4, 2, 64, rope=None),
    "window": spec_of(4, 2, 64, window=37),
    "softcap": spec_of(4, 2, 64, softcap=2.0),
    "odd": spec_of(4, 2, 24),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(backend, shape):
    case = Case(backend, SHAPES[shape], [(1, 40), (7, 23), (1, 1), (30, 30), (1, 300)])
    for got, want in zip(case.whole(), case.expected(), strict=True):
        assert relative(got, want) < TOLERANCE["f32"] * 2


@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0", "f8_e5m2"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_kv_dtypes(backend, dtype, block_size):
    if dtype not in backend.capabilities().kv_dtypes:
        assert dtype == "f8_e5m2"
        return
    case = Case(backend, spec_of(9, 3, 64), [(1, 70), (5, 33)], dtype, block_size)
    for got, want in zip(case.whole(), case.expected(), strict=True):
        assert relative(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "f8_e5m2"])
@pytest.mark.parametrize("part", ["key", "value"])
def test_what_is_no_number_in_the_cache_reaches_who_sees_it(backend, part, dtype):
    """Stored in an earlier step, so that nothing else of this one is spoilt."""
    if dtype not in backend.capabilities().kv_dtypes:
        assert dtype == "f8_e5m2"
        return
    hq, hkv, d = 4, 2, 64
    column = (hq if part == "key" else hq + hkv) * d + 40  # of KV head 0
    for bad, position in ((np.nan, 0), (np.nan, 255), (np.nan, 256), (np.inf, 3), (-np.inf, 3)):
        case = Case(backend, spec_of(hq, hkv, d, rope=None), [(1, 258), (1, 20)], dtype)
        case.qkv[0][position, column] = bad
        seen, alone = case.whole()
        if np.isnan(bad) or dtype == "q8_0":
            assert np.isnan(seen[0, :2]).any(-1).all(), position
        elif part == "value":
            assert not np.isfinite(seen[0, :2]).all()
        if backend is not backend_for("off"):  # which attends to all sequences under one mask
            assert np.isfinite(seen[0, 2:]).all()
            assert np.isfinite(alone).all()


def test_a_chunk_of_nothing_but_nans_is_not_taken_for_an_empty_one(kernel_backend):
    """Chunks are of 256 keys; this one's largest score is that of no key at all."""
    case = Case(kernel_backend, spec_of(rope=None), [(1, 257)])
    case.qkv[0][256, 4 * 64 : 5 * 64] = np.nan
    (seen,) = case.whole()
    assert np.isnan(seen[0, :2]).all()


def test_e5m2_cuts_numbers_and_nothing_else(kernel_backend):
    case = Case(kernel_backend, spec_of(hq=2, hkv=2, d=32, rope=None), [(1, 1)], "f8_e5m2")
    values = np.zeros(64, np.float32)
    values[:6] = [1e30, -1e30, 60000, np.inf, -np.inf, np.nan]
    values[6:8] = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    case.qkv[0][0, 128:] = values
    got = case.whole()[0].reshape(-1)
    np.testing.assert_array_equal(got[:5], [57344, -57344, 57344, np.inf, -np.inf])
    assert np.isnan(got[5:8]).all()


def test_norms_and_sinks(backend):
    case = Case(backend, spec_of(6, 2, 64), [(3, 50), (1, 290)])
    rng = np.random.default_rng(5)
    norms = [rng.standard_normal(64).astype(np.float32) for _ in range(2)]
    sinks = rng.standard_normal(6).astype(np.float32)
    named = {n: vector(backend, w) for n, w in zip(("q_norm", "k_norm"), norms, strict=True)}
    packed_sinks = vector(backend, sinks, WeightRole.SINKS)
    case.run([(0, 47), (0, 289)], **named)
    got = case.run([(47, 50), (289, 290)], **named, sinks=packed_sinks)
    for g, w in zip(got, case.expected(norms, sinks), strict=True):
        assert relative(g, w) < 1e-5


def test_long_decode_splits_keys(kernel_backend):
    case = Case(kernel_backend, spec_of(9, 3, 64), [(1, 1500), (2, 700)], "f16")
    for got, want in zip(case.whole(), case.expected(), strict=True):
        assert relative(got, want) < TOLERANCE["f16"]


@pytest.mark.parametrize("window", [None, 100])
def test_results_do_not_depend_on_batch_or_cut(window):
    """Whole prefill, chunked prefill, decode one by one, alone or in company: the same bits."""
    spec = spec_of(6, 2, 64, window=window)
    lengths = [(1, 600), (1, 35)]
    whole = Case(backend_for("auto"), spec, lengths, "f16")
    reference = whole.run([(0, 600), (0, 35)])
    chunked = Case(backend_for("auto", 1), spec, lengths, "f16")
    pieces = [chunked.run([(lo, hi), (lo2, hi2)]) for lo, hi, lo2, hi2 in
              [(0, 1, 0, 30), (1, 300, 30, 31), (300, 599, 31, 34), (599, 600, 34, 35)]]  # fmt: skip
    for s in (0, 1):
        np.testing.assert_array_equal(np.concatenate([p[s] for p in pieces]), reference[s])


def test_what_lies_behind_a_sequence_is_never_read(kernel_backend):
    case = Case(kernel_backend, spec_of(4, 2, 64), [(1, 21), (1, 300)], "f16")
    blocks = range(case.kv.num_blocks)
    everything = kernel_backend.kv_export(case.kv, blocks)
    poison = np.full_like(everything.data, 0xFF)  # float16 NaNs
    kernel_backend.kv_import(case.kv, blocks, type(everything)(spec=everything.spec, data=poison))
    for got, want in zip(case.whole(), case.expected(), strict=True):
        assert relative(got, want) < TOLERANCE["f16"]


def test_nan_is_not_swallowed(backend):
    case = Case(backend, spec_of(4, 2, 64), [(1, 40)])
    case.qkv[0][10, :] = np.nan
    assert np.isnan(case.whole()[0]).all()
