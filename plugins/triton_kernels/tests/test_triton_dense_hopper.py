"""Dense layers through the ring on Hopper: when it is chosen, and on such a GPU its numbers against float64.

Gluon has no interpreter, so without a GPU only the choice is tested here; that the kernel compiles
without spills is the compile gate's.
"""

import sys
from pathlib import Path

import pytest
import torch

from halogen_triton import dense as products
from halogen_triton.dense import dense_rule
from halogen_triton.launch import Launch, Rule, tuning
from halogen_triton.linear import gates, linear
from halogen_triton.pointwise_kernels import GELU_TANH, SILU

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_attention_hopper import needs_hopper
from test_triton_linear import near, normal

SHIPPED = tuning("sm_90")
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """The choice is that of compiled kernels."""
    monkeypatch.setattr(products, "active", lambda: False)


def chosen(rows, n=64, k=128, dtype=torch.bfloat16, pairs=0):
    return dense_rule(torch.empty(n, k, dtype=dtype), SHIPPED, rows, n, pairs=pairs)


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("dtype", HALVES)
def test_sm_90_takes_it_for_up_to_64_rows(rows, dtype):
    for n, k, pairs in ((64, 128, 0), (20000, 4096, 1), (5120, 27648, 0), (152064, 3584, 0)):
        weight = torch.empty(n, k, dtype=dtype, device="meta")
        rule = dense_rule(weight, SHIPPED, rows, n, pairs=pairs)
        assert rule.ring
        assert rule.launch.block_m >= max(8, rows)


def test_it_leaves_the_rest():
    assert chosen(65) is None
    assert chosen(3, dtype=torch.float32) is None
    assert not chosen(1, dtype=torch.float32).ring
    assert chosen(3, k=100) is None, "rows of W are not 16 bytes apart"
    assert not chosen(1, k=100).ring
    assert chosen(3, pairs=2) is None
    assert not chosen(1, pairs=2).ring
    odd = torch.empty(64 * 128 + 1, dtype=torch.bfloat16)[1:].view(64, 128)
    assert dense_rule(odd, SHIPPED, 3, 64) is None
    assert gates(3, torch.empty(48, 64, dtype=torch.bfloat16), SHIPPED)
    assert not gates(3, torch.empty(48, 64), SHIPPED)


def test_only_sm_90_ships_it(monkeypatch):
    assert all("dense_ring" not in tuning(arch).rules for arch in ("gfx1151", "generic"))
    monkeypatch.setattr(products, "active", lambda: True)
    assert chosen(3) is None, "the interpreter cannot run it"


def test_rows_that_the_copy_engine_cannot_read_are_copied():
    wide = torch.arange(2 * 136.0).to(torch.bfloat16).view(2, 136)
    for x in (wide[:1, 3:131], wide[:, 3:131], wide[:, :128].float(), wide.T[:128].T):
        read = products._readable(x, torch.bfloat16)
        assert torch.equal(read, x.to(torch.bfloat16))
        assert products._streams(read)
    assert products._readable(wide, torch.bfloat16) is wide


def shared_bytes(rule, pairs):
    launch = rule.launch
    rows = launch.block_n * (2 if pairs else 1) + launch.block_m
    return launch.stages * rows * launch.block_k * 2


def test_as_many_programs_fit_as_the_table_says():
    """`programs` are those of 132 cores with 227 KiB each."""
    for rule in SHIPPED.rules["dense_ring"]:
        gated = rule.least.get("pairs", 0)
        fit = 227 * 1024 // (shared_bytes(rule, gated) + 1024)
        assert fit >= rule.programs // 132 >= 1, rule


def ring(bm, bn, bk, stages, programs, *, pdl=False):
    launch = Launch(block_m=bm, block_n=bn, block_k=bk, stages=stages, pdl=pdl)
    return Rule(launch=launch, programs=programs, ring=True)


def oracle(x, w, bias, activation):
    y = x.double() @ w.double().T + (0.0 if bias is None else bias.double())
    if not activation:
        return y
    gate, up = y.chunk(2, 1)
    if activation == SILU.value:
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


# rows of x and of its tile, n, k, programs: whole tiles, tiles cut in all ways, cut-off tiles
CASES = [
    (1, 8, 64, 128, 1),
    (8, 8, 128, 320, 2),
    (3, 8, 1000, 1096, 7),
    (5, 8, 1000, 1096, 3),
    (13, 16, 336, 2048, 132),
    (31, 32, 64, 72, 132),
    (64, 64, 200, 904, 3),
]


@needs_hopper
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", [0, SILU.value, GELU_TANH.value])
@pytest.mark.parametrize(("rows", "bm", "n", "k", "programs"), CASES)
def test_numbers(dtype, activation, rows, bm, n, k, programs):
    x = normal(rows, k, dtype=dtype)
    w = normal(n * (2 if activation else 1), k, dtype=dtype, seed=2) / 8
    bias = None if activation else normal(n, dtype=dtype, seed=3)
    joins = torch.zeros(64, dtype=torch.int32, device=x.device)
    for bn, bk, stages in ((64, 128, 3), (128, 64, 2)):
        if activation and bn == 128:
            continue
        rule = ring(bm, bn, bk, stages, programs)
        named = {"bias": bias, "activation": activation, "joins": joins}
        got = products.dense(x, w, rule, **named)
        near(got, oracle(x, w, bias, activation))
        assert torch.equal(got, products.dense(x, w, rule, **named)), "the same bits again"
        assert not joins.any()


@needs_hopper
def test_wide_results_of_strided_rows_into_columns():
    x, w = normal(6, 192, dtype=torch.bfloat16)[:, :128], normal(40, 128, dtype=torch.bfloat16)
    rule = ring(8, 64, 64, 4, 132)
    near(products.dense(x, w, rule, out_dtype=torch.float32).bfloat16(), oracle(x, w, None, 0))
    both = torch.full((6, 100), 7.0, dtype=torch.bfloat16, device=x.device)
    products.dense(x, w, rule, y=both[:, 20:60])
    near(both[:, 20:60], oracle(x, w, None, 0))
    assert (both[:, :20] == 7).all()
    assert (both[:, 60:] == 7).all()


@needs_hopper
def test_rows_of_others_do_not_matter():
    """A NaN in one row stays there."""
    x, w = normal(8, 256, dtype=torch.bfloat16), normal(80, 256, dtype=torch.bfloat16, seed=2)
    want = linear(x, w, SHIPPED)
    x[3] = float("nan")
    got = linear(x, w, SHIPPED)
    assert got[3].isnan().all()
    keep = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(got[keep], want[keep])


@needs_hopper
def test_dependent_launches_give_the_same_bits():
    """A chain of products: each begins before the one that makes its rows has ended."""
    x = normal(4, 512, dtype=torch.bfloat16)
    ws = [normal(512, 512, dtype=torch.bfloat16, seed=i) / 16 for i in range(12)]
    joins = torch.zeros(64, dtype=torch.int32, device=x.device)
    chains = []
    for pdl in (False, True):
        y = x
        for w in ws:
            y = products.dense(y, w, ring(8, 64, 128, 3, 37, pdl=pdl), joins=joins)
        chains.append(y)
    assert torch.equal(*chains)
    assert chains[0].isfinite().all()
