"""INT4, MXFP4 and int8 weights as planes: bit-exact values, and products against float64."""

import os
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from halogen_core.spi import HalogenError, WeightRole
from halogen_triton.int8 import Int8, round_rows
from halogen_triton.launch import Launch, Rule, Tuning
from halogen_triton.linear import ExpertRows, Stacked, embedding_rows, expert_linear, linear
from halogen_triton.packing import check, join, packed_part, values
from halogen_triton.planes import Planes

sys.path.insert(0, str(Path(__file__).parent))
from quantised_weights import random_weight

DEVICE = torch.device(os.environ.get("HALOGEN_TEST_DEVICE", "cpu"))
TINY = Tuning(
    arch="test",
    source="test",
    rules={
        "plane_gemv": (Rule(launch=Launch(block_n=8, block_k=128)),),
        "plane_gemm": (Rule(launch=Launch(block_m=16, block_n=16, block_k=128)),),
        "int8_gemm": (Rule(launch=Launch(block_m=16, block_n=16, block_k=64)),),
    },
)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
CASES = {
    "mxfp4": ("MXFP4", {}),
    "int4 symmetric": ("INT4", {"group": 32, "zeros": False}),
    "int4 zeros": ("INT4", {"group": 64}),
    "int4 one group": ("INT4", {"group": 192}),
    "int4 wide scales": ("INT4", {"group": 32, "scale": np.float32}),
    "gptq order": ("INT4", {"group": 32, "order": True}),
    "w8a16": ("W8A16", {}),
}


def pack(form, *shape, role=WeightRole.LINEAR, **options):
    tensor, want = random_weight(form, *shape, **options)
    check(tensor)
    return packed_part(tensor, DEVICE, role), torch.from_numpy(want)


def normal(*shape, dtype=torch.float32, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen).to(DEVICE, dtype)


def near(got, want, tolerance=None):
    error = (got.cpu().double() - want).abs().max() / want.abs().max()
    assert error <= (tolerance or TOLERANCE[got.dtype]), float(error)


@pytest.mark.parametrize("name", CASES)
def test_values_are_bit_exact(name):
    form, options = CASES[name]
    weight, want = pack(form, 5, 192, **options)
    assert torch.equal(values(weight).cpu(), want.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_products(name, dtype):
    form, options = CASES[name]
    weight, want = pack(form, 20, 192, **options)
    bias = normal(20, seed=3, dtype=dtype)
    for rows in (1, 17):
        x = normal(rows, 192, dtype=dtype)
        expected = x.cpu().double() @ want.T + bias.cpu().double()
        near(linear(x, weight, TINY, bias=bias), expected)


@pytest.mark.parametrize("form", ["INT4", "MXFP4"])
def test_gated_product_of_one_row(form):
    weight, want = pack(form, 12, 128)
    x = normal(1, 128)
    gate, up = (x.cpu().double() @ want.T).chunk(2, 1)
    near(linear(x, weight, TINY, activation=1), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("form", ["MXFP4", "W8A16", "INT4"])
def test_embedding_rows(form):
    weight, want = pack(form, 9, 384, role=WeightRole.EMBEDDING)
    ids = torch.tensor([3, 0, 8, 3], dtype=torch.int32, device=DEVICE)
    near(embedding_rows(ids, weight, torch.float32, scale=2.0), 2 * want[ids.cpu().long()])


@pytest.mark.parametrize("form", ["INT4", "MXFP4", "W8A8"])
def test_experts(form):
    weight, want = pack(form, 3, 10, 128, role=WeightRole.EXPERTS)
    assert isinstance(weight, Planes)
    x = normal(4, 128)
    ids = torch.full((2, 16), 8, dtype=torch.int32)
    ids[0, :3], ids[1, :5] = torch.tensor([1, 2, 6]), torch.tensor([0, 3, 4, 5, 7])
    rows = ExpertRows(
        row_ids=ids.flatten().to(DEVICE),
        block_expert=torch.tensor([2, 0], dtype=torch.int32, device=DEVICE),
        block_m=16,
        pairs=8,
        top_k=2,
    )
    expert = [0, 2, 2, 0, 0, 0, 2, 0]
    expected = torch.stack([want[expert[p]] @ x[p // 2].cpu().double() for p in range(8)])
    near(expert_linear(x, weight, rows, TINY), expected)


def test_parts_of_one_kind_become_one_weight_and_others_stay_apart():
    first, one = pack("INT4", 8, 128, group=32, order=True, seed=1)
    second, two = pack("INT4", 16, 128, group=32, order=True, seed=2)
    third, three = pack("INT4", 8, 128, group=64, seed=3)
    fourth, four = pack("INT4", 8, 128, group=64, seed=4)
    joined = join([first, second, third, fourth])
    assert isinstance(joined, Stacked)
    assert [part.shape[0] for part in joined.parts] == [8, 16, 16]
    want = torch.cat([one, two, three, four])
    assert torch.equal(values(joined).cpu(), want.float())
    for rows in (1, 3):
        x = normal(rows, 128)
        near(linear(x, joined, TINY), x.cpu().double() @ want.T)


def test_rounded_rows_are_nearest_and_symmetric():
    x = normal(3, 200)
    x[1] = 0
    x[2, :4] = torch.tensor([254.0, 1, 3, -5])
    x[2, 4:] = 0
    rounded = round_rows(x)
    codes, scales = rounded.codes.cpu().double(), rounded.scales.cpu().double()
    assert codes[0].abs().max() == 127
    assert not codes[1].any()
    # at 2 per step: halves go to the even neighbour
    assert codes[2, :4].tolist() == [127, 0, 2, -2]
    assert ((codes * scales[:, None]) - x.cpu().double()).abs().max() <= 0.51 * scales.max()


@pytest.mark.parametrize("rows", [1, 5, 17])
def test_w8a8_is_exact_on_rounded_activations(rows):
    weight, want = pack("W8A8", 20, 200)
    assert isinstance(weight, Int8)
    x, bias = normal(rows, 200), normal(20, seed=3)
    rounded = round_rows(x)
    given = rounded.codes.cpu().double() * rounded.scales.cpu().double()[:, None]
    got = linear(x, weight, TINY, bias=bias)
    near(got, given @ want.T + bias.cpu().double(), 3e-7)
    near(got, x.cpu().double() @ want.T + bias.cpu().double(), 2e-2)


def with_aux(**changed):
    return lambda t: attrs.evolve(t, aux={**t.aux, **changed})


DAMAGE = {
    "too few bytes": (lambda t: attrs.evolve(t, data=t.data[1:]), "HRT-2411"),
    "groups of 16": (with_aux(scale=np.ones((4, 8), np.float16)), "HRT-1102"),
    "no scale": (lambda t: attrs.evolve(t, aux={}), "HRT-2411"),
    "scales of fewer rows": (with_aux(scale=np.ones((3, 4), np.float16)), "HRT-2411"),
    "zeros of another shape": (with_aux(zero=np.ones((4, 1))), "HRT-2411"),
    "an order that names a column twice": (with_aux(perm=np.zeros(128, np.int32)), "HRT-2411"),
    "an order of fewer columns": (with_aux(perm=np.arange(64, dtype=np.int32)), "HRT-2411"),
    "unknown": (lambda t: attrs.evolve(t, format="INT3"), "HRT-2410"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_does_not_fit_is_refused(name):
    tensor, _ = random_weight("INT4", 4, 128, group=32, zeros=False)
    check(tensor)
    spoil, code = DAMAGE[name]
    with pytest.raises(HalogenError) as failure:
        check(spoil(tensor))
    assert failure.value.code == code
