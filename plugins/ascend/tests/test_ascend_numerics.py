"""Simulator numerics against float64 oracles, and what must be equal to the bit."""

import numpy as np
import pytest
from ascend_oracle import gated_reference, rms
from ascend_steps import BLOCK, Config, Decoder, f32, open_sim, step

from halogen_ascend.sim.nz import from_nz, to_nz
from halogen_core.spi import Activation, MoESpec, WeightRole

HALF = 2.0**-11


def close(got, want, *, steps=4):
    """Within `steps` roundings of float16 at the scale of the result."""
    scale = np.abs(want).max() + 1e-6
    assert np.abs(got - want).max() <= steps * HALF * scale * 2


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 300])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (70, 45), (130, 64)])
def test_linear_matches_float64(backend, rows, n, k):
    rng = np.random.default_rng(rows)
    w, b = rng.standard_normal((n, k)) / np.sqrt(k), rng.standard_normal(n)
    x = rng.standard_normal((rows, k)).astype(np.float32)
    packed = backend.pack([f32(w[: n // 2]), f32(w[n // 2 :])], WeightRole.LINEAR)
    bias = backend.pack([f32(b)], WeightRole.BIAS)
    got = backend.download(backend.ops.linear(backend.upload(x), packed, bias=bias))
    assert got.shape == (rows, n)
    if rows:
        close(got, x @ w.T + b)


def test_a_model_matches_the_oracle_over_chunks_and_decode(backend):
    decoder = Decoder(backend, Config(alternate_window=40))
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 97, 300).tolist()
    want = decoder.model.logits(tokens)
    table = [7, 2, 11]
    got = [
        decoder.logits(step([(tokens[a:b], a, table)], all_logits=True))
        for a, b in ((0, 130), (130, 297), (297, 298), (298, 300))
    ]
    close(np.concatenate(got), want, steps=12)


def test_batch_chunks_and_padding_change_no_bit(backend):
    decoder = Decoder(backend)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 97, n).tolist() for n in (150, 5, 33)]
    tables = [[0, 1], [2], [3]]
    together = decoder.logits(step([(p, 0, t) for p, t in zip(prompts, tables, strict=True)]))
    for row, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        alone = decoder.logits(step([(prompt, 0, table)]))
        assert np.array_equal(alone[0], together[row])
        decoder.logits(step([(prompt[:3], 0, table)]))
        chunked = decoder.logits(step([(prompt[3:], 3, table)]))
        assert np.array_equal(chunked[0], together[row])


@pytest.mark.parametrize("dim", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 1)])
def test_attention_variants(dim, heads, kv_heads):
    from ascend_attention import one_layer

    for fields in ({}, {"window": 50}, {"softcap": 5.0}, {"sinks": True}):
        got, want = one_layer(open_sim(), dim, heads, kv_heads, **fields)
        close(got, want)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_mixture_of_experts(backend, gating):
    rng = np.random.default_rng(3)
    tokens, experts, hidden, ffn, k = 21, 6, 32, 48, 2
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    router = rng.standard_normal((experts, hidden))
    up = rng.standard_normal((experts, 2 * ffn, hidden)) / np.sqrt(hidden)
    down = rng.standard_normal((experts, hidden, ffn)) / np.sqrt(ffn)
    spec = MoESpec(num_experts=experts, top_k=k, gating=gating)
    packed = (
        backend.pack([f32(router)], WeightRole.LINEAR),
        backend.pack([f32(up)], WeightRole.EXPERTS),
        backend.pack([f32(down)], WeightRole.EXPERTS),
    )
    got = backend.download(backend.ops.moe(backend.upload(x), *packed, spec))
    logits = x @ router.T
    e = np.exp(logits - logits.max(-1, keepdims=True))
    scores = e / e.sum(-1, keepdims=True) if gating == "softmax" else 1 / (1 + np.exp(-logits))
    want = np.zeros((tokens, hidden))
    for t in range(tokens):
        best = np.argsort(-scores[t], kind="stable")[:k]
        for expert in best:
            inner = gated_reference(up[expert] @ x[t])
            want[t] += scores[t, expert] / scores[t, best].sum() * (down[expert] @ inner)
    close(got, want, steps=8)


def test_fused_mlp_equals_its_composition(backend):
    rng = np.random.default_rng(4)
    up = backend.pack([f32(rng.standard_normal((192, 64)) / 8)], WeightRole.LINEAR)
    down = backend.pack([f32(rng.standard_normal((64, 96)) / 10)], WeightRole.LINEAR)
    x = backend.upload(rng.standard_normal((37, 64)).astype(np.float32))
    ops, before = backend.ops, backend.device.timeline.launches
    fused = backend.download(ops.mlp(x, up, down, Activation.SILU))
    assert backend.device.timeline.launches == before + 1
    parts = ops.linear(ops.gated_act(ops.linear(x, up), Activation.SILU), down)
    assert np.array_equal(fused, backend.download(parts))
    assert backend.device.timeline.launches == before + 4


def test_norms_and_residual(backend):
    rng = np.random.default_rng(5)
    x, r = (rng.standard_normal((9, 80)).astype(np.float32) * 30 for _ in range(2))
    w = rng.standard_normal(80).astype(np.float32)
    packed = backend.pack([f32(w)], WeightRole.NORM)
    y, s = backend.ops.add_rms_norm(backend.upload(x), backend.upload(r), packed, eps=1e-6)
    close(backend.download(s), x + r, steps=1)
    close(backend.download(y), rms(x + r, w, 1e-6), steps=2)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("shape", [(70, 45), (16, 16), (3, 5, 100)])
def test_nz_round_trip(dtype, shape):
    import torch

    w = torch.randint(-9, 9, shape).to(getattr(torch, dtype))
    tiles = to_nz(w)
    assert tiles.shape[-1] * tiles.element_size() == 32
    assert torch.equal(from_nz(tiles, *shape[-2:]), w)


def test_block_size_is_the_parts_own(backend):
    assert backend.capabilities().kv_block_sizes[0] == BLOCK
