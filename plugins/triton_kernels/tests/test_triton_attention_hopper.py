"""The prefill kernel for Hopper: when it is chosen, and on such a GPU its numbers against float64.

Gluon has no interpreter, so without a GPU only the choice is tested here; that the kernel compiles
without spills is the compile gate's.
"""

import os
import sys
from pathlib import Path

import attrs
import pytest
import torch

from halogen_triton.attention import AttentionPlan, LayerKV, attention, serves_hopper
from halogen_triton.launch import Launch, tuning

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_attention import Problem, check, heads, plan

DEVICE = os.environ.get("HALOGEN_TEST_DEVICE", "cpu")
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(
    not HOPPER, reason="runs on NVIDIA GPUs of compute capability 9.0"
)


def hopper_plan(max_decode=1) -> AttentionPlan:
    return attrs.evolve(plan(max_decode=max_decode), hopper=Launch(stages=2))


def served(dtype=torch.bfloat16, stored=None, block=64, sinks=None, **shape) -> bool:
    kv = LayerKV(data=torch.empty(2, 2, 2, block, shape.get("d", 128), dtype=stored or dtype))
    return serves_hopper(torch.empty(1, 1, dtype=dtype), kv, heads(**{"d": 128, **shape}), sinks)


def test_it_serves_plain_16_bit_heads_of_128():
    assert served()
    assert served(torch.float16)
    assert served(block=128, hq=40, hkv=8)


@pytest.mark.parametrize(
    "case",
    [
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16, "stored": torch.int8},
        {"dtype": torch.bfloat16, "stored": torch.float16},
        {"block": 32},
        {"d": 64},
        {"d": 256},
        {"window": 512},
        {"softcap": 30.0},
        {"sinks": torch.zeros(4)},
    ],
    ids=str,
)
def test_it_leaves_the_rest(case):
    assert not served(**case)


def test_only_sm_90_ships_it():
    assert "prefill_hopper" in tuning("sm_90").rules
    assert "prefill_hopper" not in tuning("gfx1151").rules
    assert "prefill_hopper" not in tuning("generic").rules


def test_what_it_leaves_takes_the_other_kernel():
    check(Problem([40, 9], [13, 9], heads(), dtype="bf16"), "bf16", launch=hopper_plan())


@needs_hopper
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [
        ([64], [64]),
        ([300], [300]),
        ([1024], [300]),
        ([970], [2]),
        ([1000, 257, 130, 5], [1000, 200, 2, 1]),
    ],
)
def test_numbers(dtype, block, lengths, queries):
    problem = Problem(lengths, queries, heads(hq=10, hkv=2, d=128), dtype=dtype, block=block)
    check(problem, dtype, launch=hopper_plan())


@needs_hopper
@pytest.mark.parametrize(("hq", "hkv"), [(3, 3), (7, 1), (16, 2), (24, 1)])
def test_groups(hq, hkv):
    problem = Problem([400], [333], heads(hq=hq, hkv=hkv, d=128), dtype="bf16", block=64)
    check(problem, "bf16", launch=hopper_plan())


@needs_hopper
def test_slots_past_the_end_may_hold_anything():
    problem = Problem([300, 70], [300, 70], heads(d=128), dtype="bf16", block=64)
    for s, n in enumerate(problem.lengths):
        problem.kv.data[problem.tables[s, n // 64].long(), :, :, n % 64 :] = float("nan")
    check(problem, "bf16", launch=hopper_plan())


@needs_hopper
def test_strided_queries_are_read_in_place():
    problem = Problem([200], [150], heads(d=128), dtype="bf16", block=64)
    wide = torch.cat([problem.q, torch.full_like(problem.q, float("nan"))], 1).to(DEVICE)
    q, sequences = wide[:, : problem.q.shape[1]], problem.sequences()
    out = attention(q, problem.kv, sequences, problem.shape, hopper_plan()).cpu().double()
    want = problem.oracle()
    assert float((out - want).abs().max() / want.abs().max()) <= 1.6e-2
