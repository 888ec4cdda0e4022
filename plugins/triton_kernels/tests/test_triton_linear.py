"""Linear kernels in the interpreter against float64."""

import os

import attrs
import numpy as np
import pytest
import torch

from halogen_core.spi import FORMATS
from halogen_triton.launch import Launch, Rule, Tuning
from halogen_triton.linear import ExpertRows, embedding_rows, expert_linear, linear
from halogen_triton.planes import PLANE_FORMATS, dequantise, repack
from halogen_triton.pointwise_kernels import SILU

GGUF_FORMATS = [name for name in PLANE_FORMATS if name in FORMATS]
DEVICE = os.environ.get("HALOGEN_TEST_DEVICE", "cpu")
TINY = Tuning(
    arch="test",
    source="test",
    rules={
        "dense_gemv": (Rule(launch=Launch(block_n=4, block_k=32)),),
        "plane_gemv": (Rule(launch=Launch(block_n=4, block_k=128)),),
        "dense_gemm": (Rule(launch=Launch(block_m=16, block_n=16, block_k=32)),),
        "plane_gemm": (Rule(launch=Launch(block_m=16, block_n=16, block_k=128)),),
    },
)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


def near(got, want):
    error = (got.cpu().double() - want.cpu()).abs().max() / want.abs().max().cpu()
    assert error <= TOLERANCE[got.dtype], float(error)


def normal(*shape, dtype=torch.float32, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen).to(DEVICE, dtype)


def planes(name, *lead, k, seed=0):
    rng = np.random.default_rng(seed)
    fmt = FORMATS[name]
    raw = rng.integers(0, 256, (*lead, k // fmt.block, fmt.bytes), dtype=np.uint8)
    for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q6_K": (208,)}.get(
        name, (0,)
    ):
        value = rng.uniform(0.5, 1.5, (*lead, k // fmt.block)).astype(np.float16) / 64
        raw[..., at : at + 2] = value[..., None].view(np.uint8)
    packed = repack(name, torch.from_numpy(raw).to(DEVICE), (*lead, k))
    return packed, dequantise(packed).double()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 7, 96), (1, 1, 64), (1, 8, 50), (3, 20, 64), (17, 33, 80)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_dense(dtype, rows, n, k, with_bias):
    x, w = normal(rows, k, dtype=dtype), normal(n, k, dtype=dtype, seed=2)
    bias = normal(n, dtype=dtype, seed=3) if with_bias else None
    want = x.double() @ w.double().T + (bias.double() if with_bias else 0)
    near(linear(x, w, TINY, bias=bias), want)


@pytest.mark.parametrize("name", GGUF_FORMATS)
@pytest.mark.parametrize("rows", [1, 3])
def test_planes(name, rows):
    k = 512 if name.endswith("K") else 160
    w, w64 = planes(name, 6, k=k)
    x, bias = normal(rows, k), normal(6, seed=3)
    near(linear(x, w, TINY, bias=bias), x.double() @ w64.T + bias.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
def test_planes_in_half_precision(name, dtype):
    w, w64 = planes(name, 18, k=256)
    for rows in (1, 18):
        x = normal(rows, 256, dtype=dtype)
        near(linear(x, w, TINY), x.double() @ w64.T)


@pytest.mark.parametrize("name", [None, "Q4_0", "Q8_0", "Q5_K"])
def test_gated_gemv_is_the_composition(name):
    k = 256
    if name:
        w, w64 = planes(name, 10, k=k)
    else:
        w = normal(10, k, seed=2)
        w64 = w.double()
    x = normal(1, k)
    gate, up = (x.double() @ w64.T).chunk(2, 1)
    near(linear(x, w, TINY, activation=SILU.value), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_embedding_rows(name):
    w, w64 = planes(name, 9, k=768)
    ids = torch.tensor([3, 0, 8, 3], dtype=torch.int32, device=DEVICE)
    near(embedding_rows(ids, w, torch.float32, scale=2.0), 2 * w64[ids.long()])


@pytest.mark.parametrize("name", [None, "Q4_K"])
def test_experts_take_their_own_rows(name):
    experts, k, n, top_k = 3, 256, 10, 2
    if name:
        w, w64 = planes(name, experts, n, k=k)
    else:
        w = normal(experts, n, k, seed=2)
        w64 = w.double()
    x = normal(4, k)
    choice = torch.tensor([[2, 0], [0, 2], [2, 1], [0, 1]], dtype=torch.int32).flatten()
    # pairs of expert 0, of 2, an unused block, and of 1, each padded to a tile
    blocks = [(0, [1, 2, 6]), (2, [0, 3, 4]), (-1, []), (1, [5, 7])]
    ids = torch.full((4, 16), 8, dtype=torch.int32)
    for b, (_, pairs) in enumerate(blocks):
        ids[b, : len(pairs)] = torch.tensor(pairs, dtype=torch.int32)
    rows = ExpertRows(
        row_ids=ids.flatten().to(DEVICE),
        block_expert=torch.tensor([e for e, _ in blocks], dtype=torch.int32, device=DEVICE),
        block_m=16,
        pairs=8,
        top_k=top_k,
    )
    want = torch.stack([w64[choice[p]] @ x[p // top_k].double() for p in range(8)])
    near(expert_linear(x, w, rows, TINY), want)


@pytest.mark.parametrize("name", [None, "Q4_K", "Q6_K"])
def test_the_vendors_library_gives_the_same(name):
    k = 256
    if name:
        w, w64 = planes(name, 20, k=k)
    else:
        w = normal(20, k, seed=2)
        w64 = w.double()
    kind = "plane_gemm" if name else "dense_gemm"
    rule = attrs.evolve(TINY.rules[kind][0], library=True)
    table = attrs.evolve(TINY, rules={**TINY.rules, kind: (rule,)})
    x, bias = normal(5, k), normal(20, seed=3)
    near(linear(x, w, table, bias=bias), x.double() @ w64.T + bias.double())
    # more precision than the library gives comes from our own kernel
    wide = linear(x.half(), w if name else w.half(), table, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert not torch.equal(wide, wide.half().float())
