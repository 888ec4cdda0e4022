"""The forms of products over bit planes, each for every format, against float64.

Which one a launch takes is chosen from its shape and arch (`linear_kernels`). One row: runs of two
blocks a lane, single blocks, or loads ahead of the products. More: whole blocks or slices of them.
"""

import sys
from pathlib import Path

import attrs
import pytest
import torch

from halogen_triton import linear_kernels
from halogen_triton.launch import Launch, Rule
from halogen_triton.linear import linear
from halogen_triton.pointwise_kernels import SILU

sys.path.insert(0, str(Path(__file__).parent))
import test_triton_linear
from test_triton_formats import TINY, near, normal, pack

FORMATS = {
    "Q4_0": {},
    "Q4_1": {},
    "Q5_0": {},
    "Q5_1": {},
    "Q8_0": {},
    "Q4_K": {},
    "Q5_K": {},
    "Q6_K": {},
    "MXFP4": {},
    "INT4": {"group": 32},
    "W8A16": {},
}
FORMS = [0, 1, 2]


def table(blocks):
    launch = Launch(block_n=2, block_k=32 * blocks, warps=1)
    return attrs.evolve(TINY, rules={**TINY.rules, "plane_gemv": (Rule(launch=launch),)})


@pytest.fixture(params=FORMS, ids=["ahead", "single blocks", "runs of two"])
def form(request, monkeypatch):
    monkeypatch.setitem(linear_kernels.plane_gemv.values, "RUN", lambda _: request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_one_row_in_every_form(form, name, dtype):
    # rows and blocks both end within a tile
    weight, want = pack(name, 5, 768, **FORMATS[name])
    x, bias = normal(1, 768, dtype=dtype), normal(5, seed=3, dtype=dtype)
    near(linear(x, weight, table(16), bias=bias), x.cpu().double() @ want.T + bias.cpu().double())


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "Q4_0"])
def test_gated_rows_in_every_form(form, name):
    weight, want = pack(name, 6, 512)
    x = normal(1, 512)
    gate, up = (x.cpu().double() @ want.T).chunk(2, 1)
    got = linear(x, weight, table(8), activation=SILU.value)
    near(got, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0", "W8A16"])
def test_an_odd_number_of_blocks_and_a_single_one(name):
    for k in (32, 96, 160):
        weight, want = pack(name, 3, k)
        x = normal(1, k)
        near(linear(x, weight, table(2), bias=None), x.cpu().double() @ want.T)


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "W8A16"])
def test_what_lies_past_the_end_adds_nothing(form, name):
    """Also where the last block, which is read in its stead, holds what zero times is no number."""
    weight, want = pack(name, 3, 256 * 3)
    x = normal(1, 256 * 3)
    x[0, -1] = float("inf")
    got = linear(x, weight, table(16))
    expected = x.cpu().double() @ want.T
    assert torch.equal(got.cpu().isnan(), expected.isnan())
    assert torch.equal(got.cpu()[expected.isinf()].double(), expected[expected.isinf()])


@pytest.fixture(params=[True, False], ids=["whole blocks", "slices"])
def whole(request, monkeypatch):
    monkeypatch.setitem(linear_kernels.plane_gemm.values, "WHOLE", lambda _: request.param)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_in_both_forms(name, dtype):
    # rows, outputs and blocks all end within a tile
    weight, want = pack(name, 21, 256 * 3, **FORMATS[name])
    launch = Launch(block_m=16, block_n=16, block_k=512)
    rules = {**TINY.rules, "plane_gemm": (Rule(launch=launch),)}
    x, bias = normal(3, 256 * 3, dtype=dtype), normal(21, seed=3, dtype=dtype)
    got = linear(x, weight, attrs.evolve(TINY, rules=rules), bias=bias)
    near(got, x.cpu().double() @ want.T + bias.cpu().double())


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("bits", [0x7FFF, 0x7C01, -1])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0"])
def test_a_scale_that_is_no_number_spoils_its_row_alone(name, bits):
    """Rounding by adding to bits could carry it into a number."""
    weight, _ = pack(name, 5, 256)
    scales = weight.supers if name.endswith("K") else weight.scales
    scales.view(torch.int16)[2, 0] = bits
    got = linear(normal(3, 256, dtype=torch.bfloat16), weight, TINY)
    assert got.cpu().isnan().any(0).tolist() == [False, False, True, False, False]
    assert got.cpu()[:, 2].isnan().all()


@pytest.mark.usefixtures("whole")
def test_experts_in_both_forms():
    test_triton_linear.test_experts_take_their_own_rows("Q4_K")


@pytest.mark.parametrize(
    ("stages", "block_m", "form"), [(1, 16, True), (2, 16, False), (1, 256, False)]
)
def test_blocks_are_whole_where_nothing_is_staged_and_both_tiles_fit(stages, block_m, form):
    launch = {"BM": block_m, "BN": 64, "NB": 4, "num_stages": stages, "x": torch.empty(0).half()}
    assert linear_kernels.plane_gemm.values["WHOLE"](launch) is form
