"""Paged attention in the interpreter against a dense float64 oracle."""

import math
import os
from itertools import product

import attrs
import pytest
import torch

from halogen_triton.attention import (
    STORES,
    AttentionPlan,
    HeadShape,
    LayerKV,
    Sequences,
    attention,
)
from halogen_triton.launch import Launch

DEVICE = os.environ.get("HALOGEN_TEST_DEVICE", "cpu")
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {"f32": 2e-6, "f16": 2e-3, "bf16": 1.6e-2}


def quantise(x, store):
    """(stored, scales, exact float64 values of what is stored) of x [N, Hkv, B, D]."""
    if store == "q8_0":
        groups = x.float().unflatten(-1, (-1, 32))
        scale = (groups.abs().amax(-1) / 127).half()
        q = (groups / scale.float().clamp_min(1e-8)[..., None]).round().clamp(-127, 127)
        values = (q.double() * scale.double()[..., None]).flatten(-2)
        return q.to(torch.int8).flatten(-2), scale, values
    if store == "f8_e5m2":
        stored = x.float().to(torch.float8_e5m2)
        return stored.view(torch.uint8), None, stored.double()
    return x, None, x.double()


class Problem:
    """Random paged KV with shuffled blocks and poisoned unused slots."""

    def __init__(self, lengths, queries, shape, *, dtype="f32", store=None, block=8, seed=0):
        gen = torch.Generator().manual_seed(seed)
        store = store or dtype
        per = max(math.ceil(max(lengths) / block), 1)
        total = per * len(lengths) + 1
        dims = (total, shape.num_kv_heads, block, shape.head_dim)
        make = lambda *s: torch.randn(*s, generator=gen).to(DTYPES[dtype])  # noqa: E731
        k, v = make(*dims), make(*dims)
        order = torch.randperm(total - 1, generator=gen)[: per * len(lengths)] + 1
        tables = order.reshape(len(lengths), per).to(torch.int32)
        for s, n in enumerate(lengths):
            used = math.ceil(n / block)
            tables[s, used:] = -1
            if n % block:
                k[tables[s, used - 1], :, n % block :] = 30000.0 if store != "q8_0" else 9.0
        self.k, ks, self.k64 = quantise(k, store)
        self.v, vs, self.v64 = quantise(v, store)
        scales = None if ks is None else torch.stack([ks, vs], 1)
        data = torch.stack([self.k, self.v], 1).to(DEVICE)
        scales = None if scales is None else scales.to(DEVICE)
        self.kv = LayerKV(data=data, scales=scales, store=STORES[store])
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
        self.q = make(int(starts[-1]), shape.num_heads * shape.head_dim)
        self.lengths, self.queries, self.shape, self.block = lengths, queries, shape, block
        self.tables, self.starts = tables, starts

    def sequences(self, *, flash=True, max_decode=1):
        return Sequences(
            starts=self.starts.to(DEVICE),
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32).to(DEVICE),
            tables=self.tables.to(DEVICE),
            num_tokens=int(self.starts[-1]),
            max_query_len=max(self.queries),
            has_decodes=any(0 < n <= max_decode for n in self.queries),
            has_prefills=any(n > max_decode for n in self.queries),
            flash=flash,
        )

    def oracle(self, sinks=None):
        shape, rows = self.shape, []
        group = shape.num_heads // shape.num_kv_heads
        for s, (n, count) in enumerate(zip(self.lengths, self.queries, strict=True)):
            used = self.tables[s, : math.ceil(n / self.block)].long()
            k = self.k64[used].transpose(1, 2).flatten(0, 1)[:n].repeat_interleave(group, 1)
            v = self.v64[used].transpose(1, 2).flatten(0, 1)[:n].repeat_interleave(group, 1)
            q = self.q[self.starts[s] : self.starts[s + 1]].cpu().double()
            scores = torch.einsum("mhd,nhd->hmn", q.unflatten(1, (shape.num_heads, -1)), k)
            scores = scores * shape.scale
            if shape.softcap:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            at = torch.arange(n - count, n)[:, None]
            key = torch.arange(n)[None, :]
            hidden = key > at
            if shape.window:
                hidden |= key <= at - shape.window
            scores = scores.masked_fill(hidden, -math.inf)
            if sinks is not None:
                extra = sinks.double()[:, None, None].expand(-1, count, 1)
                scores = torch.cat([scores, extra], -1)
            p = scores.softmax(-1)[..., :n]
            rows.append(torch.einsum("hmn,nhd->mhd", p, v).flatten(1))
        return torch.cat(rows)


def plan(*, bm=32, bn=16, programs=3, max_decode=1, in_turn=False):
    return AttentionPlan(
        prefill=Launch(block_m=bm, block_n=bn),
        decode=Launch(block_n=bn, in_turn=in_turn),
        programs=programs,
        max_decode=max_decode,
    )


def check(problem, dtype, *, launch=None, flash=True, sinks=None, max_decode=1):
    launch = launch or plan(max_decode=max_decode)
    sequences = problem.sequences(flash=flash, max_decode=max_decode)
    own = None if sinks is None else sinks.to(DEVICE)
    q = problem.q.to(DEVICE)
    out = attention(q, problem.kv, sequences, problem.shape, launch, sinks=own).cpu()
    want = problem.oracle(sinks)
    error = (out.double() - want).abs().max() / want.abs().max()
    assert torch.isfinite(out).all()
    assert error <= TOLERANCE[dtype], float(error)


def heads(hq=4, hkv=2, d=16, **rest):
    return HeadShape(num_heads=hq, num_kv_heads=hkv, head_dim=d, scale=d**-0.5, **rest)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [
        ([1], [1]),
        ([40, 7, 17], [1, 1, 1]),
        ([16, 33], [16, 33]),
        ([40, 9], [13, 9]),
        ([50, 20, 8, 31], [1, 20, 1, 4]),
    ],
)
def test_mixed_steps(dtype, lengths, queries):
    check(Problem(lengths, queries, heads(), dtype=dtype), dtype)


@pytest.mark.parametrize("programs", [1, 2, 5, 7, 40])
@pytest.mark.parametrize("in_turn", [False, True])
def test_any_number_of_programs_gives_the_same_answer(programs, in_turn):
    launch = plan(programs=programs, in_turn=in_turn)
    check(Problem([70, 3, 16, 33], [1] * 4, heads()), "f32", launch=launch)


@pytest.mark.parametrize("options", [{"hq": 7, "hkv": 1, "d": 24}, {"window": 24}], ids=str)
def test_parts_are_joined_in_turn(options):
    sinks = torch.linspace(-2, 3, heads(**options).num_heads)
    for lengths in ([200, 1, 40], [8]):
        problem = Problem(lengths, [1] * len(lengths), heads(**options))
        check(problem, "f32", launch=plan(programs=11, in_turn=True), sinks=sinks)
    check(Problem([90, 19], [3, 2], heads()), "f32", max_decode=4,
          launch=plan(programs=9, max_decode=4, in_turn=True))  # fmt: skip


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("store", ["q8_0", "f8_e5m2"])
@pytest.mark.parametrize("queries", [[1, 1], [12, 1]])
def test_quantised_storage(store, flash, queries):
    problem = Problem([45, 20], queries, heads(d=32), dtype="f16", store=store)
    check(problem, "f16", flash=flash)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 5},
        {"window": 24},
        {"softcap": 2.0},
        {"hq": 5, "hkv": 1},
        {"hq": 14, "hkv": 2},
        {"hq": 3, "hkv": 3},
        {"d": 24},
        {"d": 80},
    ],
    ids=str,
)
def test_layer_options(options, flash):
    shape = heads(**options)
    check(Problem([60, 19, 5], [1, 1, 1], shape), "f32", flash=flash)
    check(Problem([60, 19, 5], [7, 19, 1], shape), "f32", flash=flash)


@pytest.mark.parametrize("unmasked", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 24}, {"d": 24}], ids=str)
def test_weights_summed_at_the_end(unmasked, options):
    decode = Launch(block_n=16, unmasked=unmasked, lazy=True)
    launch = attrs.evolve(plan(programs=7), decode=decode)
    for flash in (False, True):
        problem = Problem([70, 3, 33], [1, 1, 1], heads(**options))
        check(problem, "f32", launch=launch, flash=flash)


GROUPED = AttentionPlan(
    prefill=Launch(block_m=16, block_n=16, grouped=True, unmasked=False),
    decode=Launch(block_n=16, grouped=True, unmasked=False, in_turn=True),
    programs=5,
)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("options", [{"d": 32}, {"d": 96, "window": 24}, {"hq": 7, "hkv": 1, "d": 128}],
                         ids=str)  # fmt: skip
def test_products_with_q8_0_by_groups(dtype, options):
    """Where the same products with dequantised keys and values would spill registers."""
    wide = attrs.evolve(GROUPED, decode=attrs.evolve(GROUPED.decode, in_turn=False, block_n=32))
    for launch, queries, flash in (
        (GROUPED, [1, 1, 1], True),
        (GROUPED, [1, 1, 1], False),
        (GROUPED, [9, 1, 3], True),
        (wide, [1, 1, 1], True),
    ):
        problem = Problem([45, 7, 20], queries, heads(**options), dtype=dtype, store="q8_0")
        check(problem, dtype, launch=launch, flash=flash)


def spoil(problem, side, key, store):
    """What is no number as K (side 0) or V (1) of `key` in sequence 0, KV head 0; as it is stored."""
    block, at = problem.tables[0, key // problem.block].long(), key % problem.block
    if store == "q8_0":
        problem.kv.scales[block, side, 0, at, 0] = math.nan
    elif store == "f8_e5m2":
        problem.kv.data[block, side, 0, at, 3] = 0x7F
    else:
        problem.kv.data[block, side, 0, at, 3] = math.nan


@pytest.mark.parametrize("side", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("store", ["f16", "q8_0", "f8_e5m2", "q8_0 by groups"])
def test_what_is_no_number_in_the_cache_reaches_who_sees_it(store, side):
    store, _, grouped = store.partition(" ")
    split = attrs.evolve(plan(programs=5), direct=False)
    lazy = attrs.evolve(plan(), decode=Launch(block_n=16, unmasked=True, lazy=True))
    turn = plan(programs=5, in_turn=True)
    launches = (plan(), split, turn, lazy) if store == "f16" else (plan(),)
    launches = (GROUPED,) if grouped else launches
    for launch, queries, key in product(launches, (1, 3), (0, 17)):
        problem = Problem([20, 7], [queries, 1], heads(d=32), dtype="f16", store=store)
        spoil(problem, side, key, store)
        sequences = problem.sequences()
        out = attention(problem.q.to(DEVICE), problem.kv, sequences, problem.shape, launch)
        out = out.unflatten(1, (4, -1)).isnan().any(-1)  # [T, Hq], 2 heads a KV head
        assert out[queries - 1, :2].all(), (launch, queries, key)
        assert not out[:, 2:].any()
        assert not out[queries:].any()


def test_small_weights_of_small_values_are_kept():
    """A weight times a scale, were it rounded to float16, would be 0, and so would the result."""
    problem = Problem([200], [1], heads(hq=2, hkv=1, d=32), dtype="f16", store="q8_0", block=16)
    problem.q[:] = 1.0
    keys = torch.zeros_like(problem.k64)
    values = torch.full_like(problem.v64, 1e-4)
    # one key, whose value is 0, outweighs each of the others by 2^11, all of them by 10
    first = problem.tables[0, 0].long()
    keys[first, :, 0], values[first, :, 0] = 1.35, 0.0
    (k, ks, problem.k64), (v, vs, problem.v64) = quantise(keys, "q8_0"), quantise(values, "q8_0")
    problem.kv = LayerKV(
        data=torch.stack([k, v], 1).to(DEVICE),
        scales=torch.stack([ks, vs], 1).to(DEVICE),
        store=STORES["q8_0"],
    )
    check(problem, "f16", launch=GROUPED)


def test_short_contexts_are_split_where_the_other_kernel_would_spill():
    launch = attrs.evolve(plan(programs=7), direct=False)
    check(Problem([70, 3, 33], [1, 1, 1], heads()), "f32", launch=launch, flash=False)


def test_counters_are_left_at_zero():
    problem, joins = Problem([70, 3, 33], [1] * 3, heads()), torch.zeros(6, dtype=torch.int32)
    joins = joins.to(DEVICE)
    arguments = (problem.kv, problem.sequences(), problem.shape, plan(programs=7))
    first = attention(problem.q.to(DEVICE), *arguments, joins=joins)
    assert not joins.any()
    assert torch.equal(first, attention(problem.q.to(DEVICE), *arguments, joins=joins))


@pytest.mark.parametrize(
    ("programs", "pairs", "want"),
    [(132, 8, 128), (132, 100, 132), (264, 256, 256), (132, 512, 132)],
)
def test_a_split_is_even_where_little_is_left_unused(programs, pairs, want):
    assert plan(programs=programs).split(pairs) == want


@pytest.mark.parametrize("flash", [False, True])
def test_sinks(flash):
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    problem = Problem([60, 19], [1, 1], heads(window=9))
    check(problem, "f32", flash=flash, sinks=sinks)
    check(Problem([60, 19], [30, 1], heads()), "f32", flash=flash, sinks=sinks)


@pytest.mark.parametrize("flash", [False, True])
def test_few_queries_per_sequence_take_the_decode_kernel(flash):
    problem = Problem([60, 19, 4], [4, 2, 3], heads())
    check(problem, "f32", flash=flash, max_decode=4)


@pytest.mark.parametrize("block", [8, 16, 32])
def test_block_sizes_around_the_tile(block):
    check(Problem([60, 19], [1, 1], heads(), block=block), "f32")
    check(Problem([60, 19], [37, 3], heads(), block=block), "f32")


def test_strided_queries_are_read_in_place():
    problem = Problem([20, 9], [1, 9], heads())
    wide = torch.cat([problem.q, torch.full_like(problem.q, math.nan)], 1).to(DEVICE)
    problem.q = wide[:, : problem.q.shape[1]]
    check(problem, "f32")


def test_empty_step():
    problem = Problem([4], [1], heads())
    out = attention(
        problem.q[:0].to(DEVICE), problem.kv, problem.sequences(), problem.shape, plan()
    )
    assert out.shape == (0, 64)
