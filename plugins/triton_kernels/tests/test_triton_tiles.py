"""Packed weights as tiles: the same bits, and products on matrix units against float64."""

import os
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from halogen_core.spi import WeightRole
from halogen_triton.launch import Launch, Rule, Tuning
from halogen_triton.linear import embedding_rows, gates, linear
from halogen_triton.packing import arranged, packed_part, values
from halogen_triton.planes import dequantise
from halogen_triton.tiles import Tiles, tileable, tiled, untiled

sys.path.insert(0, str(Path(__file__).parent))
from quantised_weights import random_weight

DEVICE = torch.device(os.environ.get("HALOGEN_TEST_DEVICE", "cpu"))
N, K = 48, 1024
CASES = {
    "q4_0": ("Q4_0", {}),
    "q4_1": ("Q4_1", {}),
    "q4_k": ("Q4_K", {}),
    "mxfp4": ("MXFP4", {}),
    "int4 g32": ("INT4", {"group": 32, "zeros": False}),
    "int4 g64": ("INT4", {"group": 64}),
    "int4 g128": ("INT4", {"group": 128}),
    "int4 g512": ("INT4", {"group": 512}),
    "int4 f32": ("INT4", {"group": 128, "scale": np.float32}),
    "gptq order": ("INT4", {"group": 128, "order": True}),
    "q8_0": ("Q8_0", {}),
    "q5_0": ("Q5_0", {}),
    "q5_1": ("Q5_1", {}),
    "q5_k": ("Q5_K", {}),
    "q6_k": ("Q6_K", {}),
    "w8a16": ("W8A16", {}),
}
QUICK = ("q4_k", "q6_k", "q8_0", "int4 g128", "mxfp4")
SOME = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]


def table(*, split=1):
    """Launches that cover K by one program or by several."""
    launch, programs = Launch(block_n=32), 2 * split
    eight, sixteen = (attrs.evolve(launch, block_m=m) for m in (8, 16))
    rules = {
        "tile_gemv": (Rule(launch=launch, programs=programs),),
        "tile_gemm": (
            Rule(launch=eight, programs=programs, bounds={"m": 8}),
            Rule(launch=sixteen, programs=programs),
        ),
    }
    return Tuning(arch="test", source="test", rules=rules)


def pack(name, n=N, k=K):
    form, options = CASES[name]
    tensor, want = random_weight(form, n, k, **options)
    return packed_part(tensor, DEVICE, WeightRole.LINEAR), torch.from_numpy(want)


def normal(*shape, dtype=torch.float32, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen).to(DEVICE, dtype)


def near(got, want, tolerance=2e-5):
    error = (got.cpu().double() - want).abs().max() / want.abs().max()
    assert error <= tolerance, float(error)


@pytest.mark.parametrize("name", CASES)
def test_tiles_are_the_same_bits(name):
    planes, want = pack(name)
    tiles = tiled(planes)
    assert all(map(torch.equal, untiled(tiles).tensors, planes.tensors))
    assert torch.equal(values(tiles).cpu(), dequantise(planes).cpu())
    assert torch.equal(values(tiles).cpu(), want.float())
    assert tiles.nbytes <= 1.035 * planes.nbytes + 4 * N


@pytest.mark.parametrize("name", SOME)
def test_products_of_one_row_and_of_a_few(name):
    planes, want = pack(name)
    bias = normal(N, seed=3)
    for rows in (1, 3):
        x = normal(rows, K, dtype=torch.bfloat16)
        expected = x.cpu().double() @ want.T + bias.cpu().double()
        near(linear(x, tiled(planes), table(), bias=bias, out_dtype=torch.float32), expected)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("q4_k", 11), *(pytest.param(name, 17, marks=pytest.mark.slow) for name in QUICK)],
)
def test_two_tiles_of_rows_and_more(name, rows):
    planes, want = pack(name)
    x = normal(rows, K, dtype=torch.bfloat16)
    near(linear(x, tiled(planes), table(), out_dtype=torch.float32), x.cpu().double() @ want.T)


@pytest.mark.parametrize("rows", [1, 2])
def test_words_of_high_bits_for_an_odd_number_of_chunks(rows):
    planes, want = pack("q5_k", 16, 768)
    x = normal(rows, 768, dtype=torch.bfloat16)
    near(
        linear(x, tiled(planes), table(split=2), out_dtype=torch.float32), x.cpu().double() @ want.T
    )


@pytest.mark.parametrize("rows", [1, 2])
def test_split_products_leave_their_tickets_at_zero(rows):
    planes, want = pack("q4_k", 32, 2048)
    tiles = tiled(planes)
    for seed in (1, 2):
        x = normal(rows, 2048, dtype=torch.bfloat16, seed=seed)
        got = linear(x, tiles, table(split=2), out_dtype=torch.float32)
        near(got, x.cpu().double() @ want.T)
        assert not tiles.tickets.any()


def test_more_sums_than_tickets_are_not_split():
    planes, want = pack("mxfp4", 16, 2048)
    tiles, x = tiled(planes), normal(65, 2048, dtype=torch.bfloat16)
    assert tiles.tickets.numel() < 5
    own = table()
    rules = {**own.rules, "tile_gemm": (attrs.evolve(own.rules["tile_gemm"][1], programs=99),)}
    own = attrs.evolve(own, rules=rules)
    near(linear(x, tiles, own, out_dtype=torch.float32), x.cpu().double() @ want.T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_activations(dtype):
    planes, want = pack("q4_k", 16, 512)
    for rows in (1, 2):
        x = normal(rows, 512, dtype=dtype)
        got = linear(x, tiled(planes), table(), out_dtype=torch.float32)
        near(got, x.cpu().double() @ want.T, 3e-5)


@pytest.mark.parametrize(
    ("name", "rows", "split"),
    [
        ("q4_k", 1, 2),
        ("int4 g128", 3, 2),
        pytest.param("q4_k", 9, 1, marks=pytest.mark.slow),
        pytest.param("q6_k", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_gate_and_up_in_one(name, rows, split):
    planes, want = pack(name, 96, 2048)
    x = normal(rows, 2048, dtype=torch.bfloat16) / 16
    gate, up = (x.cpu().double() @ want.T).chunk(2, 1)
    got = linear(x, tiled(planes), table(split=split), activation=1, out_dtype=torch.float32)
    near(got, torch.nn.functional.silu(gate) * up, 5e-5)


def test_the_backend_fuses_the_gate_where_the_table_has_a_kernel():
    planes, _ = pack("q4_k", 96, 512)
    own = table()
    assert gates(1, tiled(planes), own)
    assert gates(8, tiled(planes), own)
    assert not gates(8, planes, own)
    rules = {**own.rules, "tile_gemm": (attrs.evolve(own.rules["tile_gemm"][0], library=True),)}
    assert not gates(8, tiled(planes), attrs.evolve(own, rules=rules))


@pytest.mark.parametrize("name", [n for n in CASES if n != "gptq order"])
def test_embedding_rows_are_exact(name):
    planes, want = pack(name, 48, 512)
    ids = torch.tensor([3, 0, 47, 3], dtype=torch.int32, device=DEVICE)
    got = embedding_rows(ids, tiled(planes), torch.float32, scale=2.0)
    near(got, 2 * want[ids.cpu().long()], 2e-7)


def test_the_library_takes_over_where_the_table_says():
    planes, want = pack("q4_1", 16, 512)
    own = table()
    rule = attrs.evolve(own.rules["tile_gemm"][0], library=True)
    own = attrs.evolve(own, rules={**own.rules, "tile_gemm": (rule,)})
    x = normal(4, 512)
    near(linear(x, tiled(planes), own), x.cpu().double() @ want.T)
    # more precision than the library gives comes from our own kernel
    wide = linear(x.bfloat16(), tiled(planes), own, out_dtype=torch.float32)
    near(wide, x.bfloat16().cpu().double() @ want.T)


@pytest.mark.parametrize(
    ("n", "k", "fits"), [(48, 1024, True), (40, 1024, False), (48, 640, False)]
)
def test_odd_sizes_stay_planes(n, k, fits):
    tensor, _ = random_weight("Q4_0", n, k)
    planes = packed_part(tensor, DEVICE, WeightRole.LINEAR)
    assert tileable(planes) is fits
    assert isinstance(arranged(planes, table(), torch.bfloat16), Tiles) is fits
    # float32 activations are for tests: planes are their fast path
    assert arranged(planes, table(), torch.float32) is planes
