"""Dense layers of a few rows, with K split over programs, in the interpreter against float64."""

import sys
from pathlib import Path

import attrs
import pytest
import torch

from halogen_triton.launch import Launch, Rule, tuning
from halogen_triton.linear import gates, linear
from halogen_triton.pointwise_kernels import SILU
from halogen_triton.skinny import skinny_rule

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_linear import TINY, TOLERANCE, near, normal


def few(programs=0, block_m=16):
    launch = Launch(block_m=block_m, block_n=16, block_k=32)
    return attrs.evolve(
        TINY, rules={**TINY.rules, "dense_skinny": (Rule(launch=launch, programs=programs),)}
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(2, 32, 96), (5, 33, 160), (16, 20, 200), (3, 16, 20)]
)
@pytest.mark.parametrize("programs", [0, 6, 64])
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
    assert skinny_rule(torch.zeros(3, 64), shipped, 3, 64) is None
