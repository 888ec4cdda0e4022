"""Dense layers of a decode step with their edges, in the interpreter against float64."""

import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from halogen_core.engine.batch import build_step
from halogen_core.spi import BackendOptions, TorchBackend
from halogen_triton import dense as fused
from halogen_triton.attention import HeadShape
from halogen_triton.backend import TritonBackend
from halogen_triton.launch import Launch, Rule, tuning
from halogen_triton.linear import gates, linear
from halogen_triton.pointwise import qkv_rope_store, rotation
from halogen_triton.pointwise_kernels import SILU

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_backend import DEVICE, MODELS, SMALL, open_runner, steps
from test_triton_linear import TINY, TOLERANCE, near, normal
from test_triton_pointwise import pool

EPS = 1e-5


def rule(rows, programs=0):
    launch = Launch(block_m=0 if rows == 1 else 16, block_n=16, block_k=32)
    return Rule(launch=launch, programs=programs)


def stream_of(rows, h, dtype):
    """A stream as a product leaves it (in tiles of 16), and its norm in float64."""
    x, w = normal(rows, h, dtype=dtype, seed=7), normal(h, seed=8)
    tiles = torch.nn.functional.pad(x.float().square(), (0, -h % 16)).unflatten(1, (-1, 16)).sum(2)
    normed = fused.Normed(
        stream=x,
        weighted=(x.float() * w).to(dtype),
        squares=tiles.T.contiguous(),
        weight=w,
        eps=EPS,
    )
    x = x.double()
    return normed, x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w.double()


# rows, n, k and the programs that K may be split over
SHAPES = [(1, 32, 96, 9), (1, 33, 100, 0), (5, 33, 160, 0), (16, 20, 200, 9)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "n", "k", "programs"), SHAPES)
def test_products_over_a_norm(dtype, rows, n, k, programs):
    x, want = stream_of(rows, k, dtype)
    w, bias = normal(n, k, dtype=dtype, seed=2), normal(n, dtype=dtype, seed=3)
    y = fused.dense(x, w, rule(rows, programs), bias=bias)
    near(y, want @ w.double().T + bias.double())
    near(x.settled(), want)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("programs", [0, 9])
def test_gates_over_a_norm(rows, programs):
    x, want = stream_of(rows, 96, torch.float32)
    w = normal(2 * 20, 96, seed=2) / 8
    y = fused.dense(x, w, rule(rows, programs), activation=SILU.value)
    gate, up = (want @ w.double().T).chunk(2, 1)
    near(y, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "n", "k", "programs"), SHAPES)
def test_into_the_stream(dtype, rows, n, k, programs):
    x, w = normal(rows, k, dtype=dtype), normal(n, k, dtype=dtype, seed=2)
    residual, norm, bias = (
        normal(rows, n, dtype=dtype, seed=4),
        normal(n, seed=5),
        normal(n, seed=6),
    )
    product = fused.Product(x, w, bias.to(dtype), rule(rows, programs))
    got = fused.to_stream(product, residual, norm, EPS, None)
    near(got.stream, x.double() @ w.double().T + bias.to(dtype).double() + residual.double())
    near(got.weighted, got.stream.double() * norm.double())
    near(got.squares.sum(0), got.stream.double().pow(2).sum(1))


@pytest.mark.parametrize(
    ("dtype", "neox", "rows", "programs"),
    [
        (torch.float32, True, 1, 40),
        (torch.float32, False, 4, 40),
        (torch.float16, False, 1, 0),
        (torch.bfloat16, True, 4, 0),
    ],
)
def test_into_heads(dtype, neox, rows, programs):
    """Beside the product and `qkv_rope_store` apart (which is tested against float64)."""
    hq, hkv, d, k = 6, 2, 64, 96
    shape = HeadShape(num_heads=hq, num_kv_heads=hkv, head_dim=d, scale=1.0)
    x, want = stream_of(rows, k, dtype)
    w, bias = (
        normal(*s, dtype=dtype, seed=2) for s in (((hq + 2 * hkv) * d, k), ((hq + 2 * hkv) * d,))
    )
    positions = torch.tensor([100_003, 0, 7, 9][:rows], dtype=torch.int32, device=w.device)
    slots = torch.tensor([3, 17, 8, -1][:rows], dtype=torch.int64, device=w.device)
    inv = tuple(10000.0 ** (-2 * i / d) for i in range(d // 2))
    rope = rotation(inv, d, neox=neox, factor=1.2, device=w.device)
    joins = torch.zeros(64, dtype=torch.int32, device=w.device)
    product = fused.Product(x, w, bias, rule(rows))
    kv, apart = pool("f32", d=d, dtype=dtype), pool("f32", d=d)
    q = fused.to_heads(product, rule(rows, programs), kv, positions, slots, shape, rope, joins)
    qkv = (want @ w.double().T + bias.double()).float()
    near(q, qkv_rope_store(qkv, apart, positions, slots, shape, rope).double())
    near(kv.data, apart.data.double())
    assert not joins.any()


def few(programs=0, block_m=16):
    launch = Launch(block_m=block_m, block_n=16, block_k=32)
    return attrs.evolve(
        TINY, rules={**TINY.rules, "dense_skinny": (Rule(launch=launch, programs=programs),)}
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "n", "k", "programs"),
    [(2, 32, 96, 6), (5, 33, 160, 64), (16, 20, 200, 0), (3, 16, 20, 6)],
)
def test_few_rows(dtype, rows, n, k, programs):
    x, w = normal(rows, k, dtype=dtype), normal(n, k, dtype=dtype, seed=2)
    bias = normal(n, dtype=dtype, seed=3)
    want = x.double() @ w.double().T + bias.double()
    near(linear(x, w, few(programs), bias=bias), want)


def test_counters_are_left_at_zero_and_split_sums_do_not_depend_on_the_split_of_others():
    joins = torch.zeros(64, dtype=torch.int32, device=normal(1).device)
    x, w = normal(4, 256), normal(48, 256, seed=2)
    first = linear(x, w, few(12), joins=joins)
    again = linear(x, w, few(12), joins=joins)
    assert not joins.any()
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.zeros_like(first))


@pytest.mark.parametrize("n", [32, 20])
def test_gate_of_few_rows(n):
    x, w = normal(3, 64), normal(2 * n, 64, seed=2) / 8
    split = few(64)
    assert gates(3, w, split)
    assert not gates(17, w, split)
    assert not gates(3, w, TINY)
    both = x.double() @ w.double().T
    want = torch.nn.functional.silu(both[:, :n]) * both[:, n:]
    near(linear(x, w, split, activation=SILU.value), want)


def test_more_rows_than_the_tile_take_the_gemm():
    x, w = normal(20, 64), normal(24, 64, seed=2)
    near(linear(x, w, few(8)), x.double() @ w.double().T)


def test_wide_results_of_strided_rows():
    x, w = normal(6, 96)[:, :64], normal(40, 64, seed=2)
    near(linear(x, w, few(9), out_dtype=torch.float32), x.double() @ w.double().T)


def test_float32_weights_leave_the_launches_measured_for_two_bytes():
    shipped = tuning("sm_90")
    assert gates(3, torch.zeros(48, 64, dtype=torch.bfloat16), shipped)
    assert not gates(3, torch.zeros(48, 64), shipped)
    assert fused.dense_rule(torch.zeros(3, 64), shipped, 3, 64) is None


def test_a_whole_model_decodes_as_on_plain_torch():
    """One and two rows: every edge of a layer is part of a product."""
    options = BackendOptions(extra={"dtype": "f32", "flash_threshold": "0"})
    rules = {**SMALL.rules, "dense_skinny": few(8).rules["dense_skinny"]}
    backend = TritonBackend(options, tuning=attrs.evolve(SMALL, rules=rules), device=DEVICE)
    own = open_runner(backend, MODELS["qwen2 f32"])
    plain = open_runner(TorchBackend(BackendOptions(extra={"dtype": "f32"})), MODELS["qwen2 f32"])
    for items in list(steps())[1:]:
        batch = build_step(items, 16).batch
        got, want = own.logits(batch), plain.logits(batch)
        assert np.abs(got - want).max() <= 3e-5 * np.abs(want).max()
    # who serves an op in our place gets tensors
    ops, weight = backend.triton_ops, own.decoder.weights.layers[0].output
    x = normal(1, weight.shape[1])
    assert isinstance(ops.linear(x, weight), fused.Product)
    near(ops.settled(ops.linear(x, weight)), x.double() @ weight.payload.double().T)
    ops.gated_act = ops.gated_act
    assert isinstance(ops.linear(x, weight), torch.Tensor)
