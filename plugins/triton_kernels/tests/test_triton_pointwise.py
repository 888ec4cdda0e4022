"""Fused small kernels in the interpreter against float64."""

import math
import os

import numpy as np
import pytest
import torch

from halogen_triton.attention import STORES, HeadShape, LayerKV
from halogen_triton.pointwise import (
    ACTIVATIONS,
    gated_act,
    qkv_rope_store,
    rms_norm,
    rotation,
)

DEVICE = os.environ.get("HALOGEN_TEST_DEVICE", "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def normal(*shape, dtype=torch.float32, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen).to(DEVICE, dtype)


def near(got, want, tolerance=None):
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error <= (tolerance or TOLERANCE[got.dtype]), float(error)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "h"), [(1, 33), (3, 64), (0, 8)])
def test_rms_norm(dtype, rows, h):
    x, r, w = normal(rows, h, dtype=dtype), normal(rows, h, dtype=dtype, seed=2), normal(h, seed=3)
    got, total = rms_norm(x, w, 1e-5, residual=r)
    if rows == 0:
        return
    # the interpreter truncates to bfloat16 where hardware rounds
    near(total, x.double() + r.double())
    for y, v in ((got, total.double()), (rms_norm(x, w, 1e-5)[0], x.double())):
        near(y, v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_act(dtype, kind):
    x = 4 * normal(3, 2 * 37, dtype=dtype)
    gate, up = x.double().chunk(2, 1)
    if kind == "silu":
        want = torch.nn.functional.silu(gate) * up
    elif kind == "gelu_tanh":
        want = torch.nn.functional.gelu(gate, approximate="tanh") * up
    else:
        g, u = gate.clamp(max=7), up.clamp(-7, 7)
        want = g * torch.sigmoid(1.702 * g) * (u + 1)
    near(gated_act(x, ACTIVATIONS[kind]), want)


def rotate(x, positions, inv, style, factor):
    """x [T, heads, D] in float64."""
    angle = positions.double()[:, None] * torch.tensor(inv, dtype=torch.float64, device=DEVICE)
    cos, sin = (factor * f(angle)[:, None] for f in (torch.cos, torch.sin))
    out, half = x.clone(), len(inv)
    at = (slice(0, half), slice(half, 2 * half)) if style == "neox" else (
        slice(0, 2 * half, 2), slice(1, 2 * half, 2))  # fmt: skip
    a, b = x[..., at[0]], x[..., at[1]]
    out[..., at[0]], out[..., at[1]] = a * cos - b * sin, b * cos + a * sin
    return out


def stored(kv, store):
    """[N, 2, Hkv, B, D] float64."""
    if store == "q8_0":
        return (kv.data.unflatten(-1, (-1, 32)).double() * kv.scales.double()[..., None]).flatten(
            -2
        )
    if store == "f8_e5m2":
        return kv.data.view(torch.float8_e5m2).double()
    return kv.data.double()


def pool(store, *, d, dtype=torch.float32):
    dims = (5, 2, 2, 4, d)
    if store == "q8_0":
        scales = torch.zeros(*dims[:-1], d // 32, dtype=torch.float16, device=DEVICE)
        return LayerKV(
            data=torch.zeros(*dims, dtype=torch.int8, device=DEVICE),
            scales=scales,
            store=STORES[store],
        )
    kind = torch.uint8 if store == "f8_e5m2" else dtype
    return LayerKV(data=torch.zeros(*dims, dtype=kind, device=DEVICE), store=STORES[store])


@pytest.mark.parametrize("style", ["neox", "interleaved", None])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("store", ["f32", "q8_0", "f8_e5m2"])
def test_qkv_rope_store(style, norms, store):
    t, hq, hkv, d, dim = 4, 6, 2, 64, 48
    shape = HeadShape(num_heads=hq, num_kv_heads=hkv, head_dim=d, scale=1.0)
    qkv = normal(t, (hq + 2 * hkv) * d)
    positions = torch.tensor([0, 7, 100_003, 9], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([3, 17, 8, -1], dtype=torch.int64, device=DEVICE)
    inv = tuple(10000.0 ** (-2 * i / dim) for i in range(dim // 2))
    rope = rotation(inv, dim, neox=style == "neox", factor=1.2, device=qkv.device)
    weights = (normal(d, seed=4), normal(d, seed=5)) if norms else (None, None)
    kv = pool(store, d=d)
    q = qkv_rope_store(
        qkv, kv, positions, slots, shape, rope if style else None,
        q_norm=weights[0], k_norm=weights[1], eps=1e-5,
    )  # fmt: skip
    heads = qkv.double().unflatten(1, (-1, d))
    want_q, want_k, want_v = heads.split([hq, hkv, hkv], 1)
    if norms:
        norm = lambda v, w: v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w  # noqa: E731
        want_q, want_k = norm(want_q, weights[0].double()), norm(want_k, weights[1].double())
    if style:
        want_q, want_k = (rotate(v, positions, inv, style, 1.2) for v in (want_q, want_k))
    near(q, want_q.flatten(1))
    got = stored(kv, store)
    tolerance = {"f32": 3e-6, "q8_0": 6e-3, "f8_e5m2": 0.125}[store]
    for i, slot in enumerate(slots[:3].tolist()):
        near(got[slot // 4, 0, :, slot % 4], want_k[i], tolerance)
        near(got[slot // 4, 1, :, slot % 4], want_v[i], tolerance)
        got[slot // 4, :, :, slot % 4] = 0
    assert not got.any(), "a slot below zero must write nothing"


def test_e5m2_rounds_as_torch_does():
    shape = HeadShape(num_heads=1, num_kv_heads=1, head_dim=64, scale=1.0)
    values = normal(1, 3 * 64) * torch.logspace(-7, 4, 192, device=DEVICE)
    kv = LayerKV(
        data=torch.zeros(1, 2, 1, 4, 64, dtype=torch.uint8, device=DEVICE), store=STORES["f8_e5m2"]
    )
    at = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    qkv_rope_store(values, kv, at, at.long(), shape, None)
    want = values.half().float().to(torch.float8_e5m2).view(torch.uint8)
    assert torch.equal(kv.data[0, :, 0, 0].flatten(), want[0, 64:])


def test_turns_of_a_period_cancel():
    shape = HeadShape(num_heads=1, num_kv_heads=1, head_dim=32, scale=1.0)
    rope = rotation((2 * math.pi,) * 16, 32, neox=True, factor=1.0, device=torch.device(DEVICE))
    x = normal(1, 96)
    kv = pool("f32", d=32)
    kv = LayerKV(data=kv.data[:, :, :1].contiguous(), store=0)
    at = torch.full((1,), 1000, dtype=torch.int32, device=DEVICE)
    q = qkv_rope_store(x, kv, at, torch.zeros(1, dtype=torch.int64, device=DEVICE), shape, rope)
    near(q, x[:, :32].double(), 1e-6)


def test_many_tokens_take_wider_programs():
    shape = HeadShape(num_heads=2, num_kv_heads=1, head_dim=32, scale=1.0)
    qkv = normal(256, 4 * 32)
    positions = torch.arange(256, dtype=torch.int32, device=DEVICE)
    slots = torch.full((256,), -1, dtype=torch.int64, device=DEVICE)
    slots[255] = 9
    inv = tuple(10000.0 ** (-i / 16) for i in range(16))
    rope = rotation(inv, 32, neox=True, factor=1.0, device=qkv.device)
    kv = LayerKV(data=pool("f32", d=32).data[:, :, :1].contiguous(), store=0)
    q = qkv_rope_store(qkv, kv, positions, slots, shape, rope)
    heads = qkv.double().unflatten(1, (-1, 32))
    turned = rotate(heads[:, :3], positions, inv, "neox", 1.0)
    near(q, turned[:, :2].flatten(1))
    near(kv.data[2, 0, 0, 1], turned[255, 2])
    near(kv.data[2, 1, 0, 1], heads[255, 3])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("store", STORES)
def test_what_is_no_number_stays_none_in_the_cache(store, bad):
    shape = HeadShape(num_heads=1, num_kv_heads=2, head_dim=64, scale=1.0)
    qkv = normal(2, 5 * 64)
    qkv[1, 64 + 7] = qkv[1, 3 * 64 + 40] = bad  # K of head 0, V of head 0
    kv = pool(store, d=64)
    at = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([1, 2], dtype=torch.int64, device=DEVICE)
    qkv_rope_store(qkv, kv, at, slots, shape, None)
    got = stored(kv, store)[0, :, :, 1:3].isfinite()  # [2, Hkv, slots, D]
    spoiled = torch.zeros_like(got)
    # of q8_0 a group shares its scale
    k, v = (slice(0, 32), slice(32, 64)) if store == "q8_0" else (7, 40)
    spoiled[0, 0, 1, k] = spoiled[1, 0, 1, v] = True
    assert torch.equal(got, ~spoiled)
    if math.isnan(bad) or store == "q8_0":
        assert torch.equal(stored(kv, store)[0, :, :, 1:3].isnan(), spoiled)


def test_e5m2_keeps_a_nan_of_any_bits_and_cuts_only_numbers():
    shape = HeadShape(num_heads=1, num_kv_heads=1, head_dim=32, scale=1.0)
    bits = [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001]
    nans = torch.tensor(np.array(bits, np.uint32).view(np.float32), device=DEVICE)
    large = torch.tensor([1e30, -1e30, 60000.0, -math.inf], device=DEVICE)
    qkv = torch.zeros(1, 96, device=DEVICE)
    qkv[0, 32:40] = torch.cat([nans, large])
    kv = LayerKV(
        data=torch.zeros(1, 2, 1, 4, 32, dtype=torch.uint8, device=DEVICE), store=STORES["f8_e5m2"]
    )
    at = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    qkv_rope_store(qkv, kv, at, at.long(), shape, None)
    got = stored(kv, "f8_e5m2")[0, 0, 0, 0]
    assert got[:4].isnan().all()
    assert got[4:8].tolist() == [57344.0, -57344.0, 57344.0, -math.inf]
