"""L2: blocks keep what they are given, wherever they lie, however often they move."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import numpy as np

from halogen_conformance.bench import Bench, refuses, same_bits
from halogen_conformance.case import Case, Failure
from halogen_conformance.cases.attending import BLOCK_SIZES, KV_DTYPES, attention_spec
from halogen_conformance.oracle import operations as exact
from halogen_conformance.oracle.numbers import Values
from halogen_conformance.steps import (
    Plan,
    arrange,
    batch_of,
    fill,
    nan_blocks,
    pool,
    random_blocks,
    spans,
)
from halogen_core.spi import ConfigError, KVBlocks, KVSpec


def kv_spec(dtype: str = "f32", block_size: int = 16, **more: Any) -> KVSpec:
    """Three layers, so that a wrong stride shows."""
    fields = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 64, **more}
    return KVSpec(dtype=dtype, block_size=block_size, **fields)


def cases() -> Iterator[Case]:
    """All of them."""
    for dtype in KV_DTYPES:
        for block_size in BLOCK_SIZES:
            run = partial(round_trip, spec=kv_spec(dtype, block_size))
            why = "export and import exchanged, K for V, a layer or head lost, values rounded"
            yield _case(f"round-trip/{dtype}-B{block_size}", run, why, dtype)
    for dtype in KV_DTYPES:
        run = partial(copies, spec=kv_spec(dtype))
        yield _case(f"copy/{dtype}", run, "pairs out of order, or not all layers copied", dtype)
    checks = {
        "nan-kept": (nan_kept, "bits changed on the way, through a float conversion"),
        "pool/neighbours": (neighbours, "an import that touches other blocks"),
        "pool/two-pools": (two_pools, "two pools that share memory"),
        "sharing/shuffled-tables": (shuffled, "results that depend on where blocks lie"),
        "sharing/prefix": (shared_prefix, "two sequences over the same blocks"),
        "sharing/copy-on-write": (copy_on_write, "a fork that writes into its parent"),
        "moving/under-readers": (moving, "blocks that change while another sequence is read"),
        "refuse/blocks-out-of-range": (refuse_blocks, "a block that is not there is touched"),
        "refuse/foreign-data": (refuse_data, "blocks of another spec or shape are taken"),
        "refuse/layouts": (refuse_layouts, "an impossible block size or dtype is promised"),
        "layout/size": (layout_size, "bytes_per_block that does not hold a block"),
    }
    for name, (run, why) in checks.items():
        yield _case(name, run, why)


def _case(name: str, run: Any, why: str, column: str = "") -> Case:
    return Case(id=f"L2/kv/{name}", topic="kv", why=why, run=run, column=column)


def default_spec(bench: Bench, **more: Any) -> KVSpec:
    """In the dtype and block size that the backend prefers."""
    claims = bench.capabilities
    dtype = "f32" if "f32" in claims.kv_dtypes else claims.kv_dtypes[0]
    if claims.head_dims and 64 not in claims.head_dims:
        more = {"head_dim": claims.head_dims[0], **more}
    return kv_spec(dtype, claims.kv_block_sizes[0], **more)


# ---------------------------------------------------------------- bits


def round_trip(bench: Bench, *, spec: KVSpec) -> None:
    kv = pool(bench, spec, 7)
    blocks = random_blocks(bench.rng, spec, 7)
    bench.backend.kv_import(kv, range(7), blocks)
    order = [5, 0, 6, 2, 2, 1]
    same_bits(bench.backend.kv_export(kv, order).data, blocks.data[order], "exported blocks")
    one = KVBlocks(spec=spec, data=blocks.data[:1])
    bench.backend.kv_import(kv, [4], one)
    expected = blocks.data.copy()
    expected[4] = blocks.data[0]
    after = bench.backend.kv_export(kv, list(range(7)))
    same_bits(after.data, expected, "blocks after importing one")
    if after.spec != spec:
        raise Failure(f"exported spec is {after.spec}, expected {spec}")
    if bench.backend.kv_export(kv, []).data.shape[0]:
        raise Failure("exporting no block must give no block")


def copies(bench: Bench, *, spec: KVSpec) -> None:
    kv = pool(bench, spec, 6)
    blocks = random_blocks(bench.rng, spec, 6)
    bench.backend.kv_import(kv, range(6), blocks)
    bench.backend.kv_copy(kv, [(0, 1), (1, 2), (5, 0)])
    expected = blocks.data[[5, 0, 0, 3, 4, 5]]
    same_bits(bench.backend.kv_export(kv, list(range(6))).data, expected, "blocks after copying")
    bench.backend.kv_copy(kv, [])
    bench.backend.kv_copy(kv, [(3, 3)])
    same_bits(bench.backend.kv_export(kv, [3]).data, blocks.data[3:4], "a block copied onto itself")


def nan_kept(bench: Bench) -> None:
    spec = default_spec(bench)
    kv, blocks = pool(bench, spec, 2), nan_blocks(spec, 2)
    bench.backend.kv_import(kv, [0, 1], blocks)
    same_bits(bench.backend.kv_export(kv, [0, 1]).data, blocks.data, "NaN bit patterns")


def neighbours(bench: Bench) -> None:
    spec = default_spec(bench)
    kv, blocks = pool(bench, spec, 5), random_blocks(bench.rng, spec, 5)
    bench.backend.kv_import(kv, range(5), blocks)
    for block in range(5):
        fresh = random_blocks(bench.rng, spec, 1)
        bench.backend.kv_import(kv, [block], fresh)
        blocks.data[block] = fresh.data[0]
        same_bits(bench.backend.kv_export(kv, range(5)).data, blocks.data, f"after block {block}")


def two_pools(bench: Bench) -> None:
    spec = default_spec(bench)
    first, second = pool(bench, spec, 3), pool(bench, spec, 3)
    kept = random_blocks(bench.rng, spec, 3)
    bench.backend.kv_import(first, range(3), kept)
    bench.backend.kv_import(second, range(3), random_blocks(bench.rng, spec, 3))
    same_bits(bench.backend.kv_export(first, range(3)).data, kept.data, "the first pool")


# ---------------------------------------------------------------- sharing and moving


def _attend(bench: Bench, filled: Any, plan: Plan, q: Values, layer: int = 1) -> Values:
    spec = attention_spec(dim=filled.blocks.spec.head_dim)
    meta = bench.step(batch_of(plan))
    ops = bench.backend.ops
    return bench.download(ops.attention(bench.activation(q), filled.kv, layer, meta, spec))


def _truth(bench: Bench, filled: Any, plan: Plan, q: Values) -> tuple[Values, Values]:
    spec = attention_spec(dim=filled.blocks.spec.head_dim)
    view = attrs.evolve(filled, plan=plan)
    history = [view.values(s, 1) for s in range(len(plan.spans))]
    keys, values = [k for k, _ in history], [v for _, v in history]
    starts = [0, *np.cumsum([s.queries for s in plan.spans]).tolist()]
    return (
        exact.attention(q, keys, values, spec, starts=starts),
        exact.attention(q, keys, values, spec, None, bench.arithmetic, starts=starts),
    )


def _check(bench: Bench, filled: Any, plan: Plan, q: Values, what: str) -> Values:
    got = _attend(bench, filled, plan, q)
    truth, own = _truth(bench, filled, plan, q)
    length = filled.blocks.spec.head_dim + max(s.length for s in plan.spans)
    bench.compare(got, truth, own, what=what, length=length, op="attention")
    return got


def shuffled(bench: Bench) -> None:
    spec = default_spec(bench)
    which = spans((3 * spec.block_size + 2, 2), (spec.block_size, 1))
    plan = arrange(bench.rng, which, spec.block_size)
    filled = fill(bench, plan, spec)
    q = bench.draw(3, 4 * spec.head_dim)
    first = _check(bench, filled, plan, q, "first placement")
    moved = bench.rng.permutation(plan.num_blocks).astype(np.int32)
    blocks = KVBlocks(spec=spec, data=filled.blocks.data[np.argsort(moved)])
    bench.backend.kv_import(filled.kv, range(plan.num_blocks), blocks)
    tables = np.where(plan.tables >= 0, moved[plan.tables], -1).astype(np.int32)
    again = attrs.evolve(plan, tables=tables)
    second = _check(bench, attrs.evolve(filled, blocks=blocks), again, q, "second placement")
    if bench.capabilities.deterministic:
        same_bits(second, first, "results after moving blocks")


def shared_prefix(bench: Bench) -> None:
    spec = default_spec(bench)
    size = spec.block_size
    plan = arrange(bench.rng, spans((3 * size, 1), (3 * size - 3, 2)), size)
    plan.tables[1, :2] = plan.tables[0, :2]
    filled = fill(bench, plan, spec)
    _check(bench, filled, plan, bench.draw(3, 4 * spec.head_dim), "two over one prefix")


def copy_on_write(bench: Bench) -> None:
    spec = default_spec(bench)
    size = spec.block_size
    plan = arrange(bench.rng, spans((size + size // 2, 1)), size, spare=3)
    filled = fill(bench, plan, spec)
    parent = plan.tables[0].copy()
    spare = next(b for b in range(plan.num_blocks) if b not in parent)
    bench.backend.kv_copy(filled.kv, [(int(parent[1]), spare)])
    fork = parent.copy()
    fork[1] = spare
    child = attrs.evolve(plan, tables=fork[None], spans=spans((size + size // 2 + 1, 1)))
    attention = attention_spec(dim=spec.head_dim)
    qkv = bench.draw(1, (4 + 2 * 2) * spec.head_dim)
    meta = bench.step(batch_of(child))
    bench.backend.ops.qkv_rope_store(bench.activation(qkv), filled.kv, 1, meta, attention)
    used = [int(b) for b in parent[:2]]
    after = bench.backend.kv_export(filled.kv, used).data
    same_bits(after, filled.blocks.data[used], "the parent's blocks after its fork wrote")
    data = bench.backend.kv_export(filled.kv, range(plan.num_blocks))
    forked = attrs.evolve(filled, blocks=KVBlocks(spec=spec, data=np.array(data.data)))
    _check(bench, forked, child, bench.draw(1, 4 * spec.head_dim), "the fork")


def moving(bench: Bench) -> None:
    spec = default_spec(bench)
    size = spec.block_size
    plan = arrange(bench.rng, spans((2 * size, 1), (2 * size + 1, 1)), size, spare=6)
    filled = fill(bench, plan, spec)
    q = bench.draw(2, 4 * spec.head_dim)
    before = _check(bench, filled, plan, q, "before moving")
    free = [b for b in range(plan.num_blocks) if b not in plan.tables]
    tables = plan.tables.copy()
    for column in range(2):
        # one block at a time goes out to the host and back elsewhere, while both are read
        old, new = int(tables[0, column]), free[column]
        out = bench.backend.kv_export(filled.kv, [old])
        bench.backend.kv_import(filled.kv, [old], nan_blocks(spec, 1))
        other = attrs.evolve(plan, tables=tables[1:], spans=plan.spans[1:])
        reader = _attend(bench, filled, other, q[1:])
        bench.backend.kv_import(filled.kv, [new], out)
        tables[0, column] = new
        bench.compare(reader, before[1:], before[1:], what="the other reader", op="attention")
    after = _attend(bench, filled, attrs.evolve(plan, tables=tables), q)
    bench.compare(after, before, before, what="after moving", op="attention")
    if bench.capabilities.deterministic:
        same_bits(after, before, "results after moving")


# ---------------------------------------------------------------- refusals


def refuse_blocks(bench: Bench) -> None:
    spec = default_spec(bench)
    backend, kv = bench.backend, pool(bench, spec, 3)
    kept = random_blocks(bench.rng, spec, 3)
    backend.kv_import(kv, range(3), kept)
    one = random_blocks(bench.rng, spec, 1)
    for bad in (3, -1, 1 << 31):
        refuses(lambda bad=bad: backend.kv_export(kv, [0, bad]), ConfigError)
        refuses(lambda bad=bad: backend.kv_import(kv, [bad], one), ConfigError)
        refuses(lambda bad=bad: backend.kv_copy(kv, [(bad, 0)]), ConfigError)
        refuses(lambda bad=bad: backend.kv_copy(kv, [(0, bad)]), ConfigError)
    same_bits(backend.kv_export(kv, range(3)).data, kept.data, "blocks after refusals")


def refuse_data(bench: Bench) -> None:
    spec = default_spec(bench)
    backend, kv = bench.backend, pool(bench, spec, 3)
    other = attrs.evolve(spec, num_layers=2)
    foreign = random_blocks(bench.rng, other, 1)
    refuses(lambda: backend.kv_import(kv, [0], foreign), ConfigError)
    two = random_blocks(bench.rng, spec, 2)
    refuses(lambda: backend.kv_import(kv, [0], two), ConfigError)
    refuses(lambda: backend.kv_import(kv, [0, 1, 2], two), ConfigError)


def refuse_layouts(bench: Bench) -> None:
    spec = default_spec(bench)
    for change in ({"block_size": 0}, {"block_size": -16}, {"dtype": "f7"}):
        wrong = attrs.evolve(spec, **change)
        refuses(lambda wrong=wrong: bench.backend.kv_layout(wrong), ConfigError)


def layout_size(bench: Bench) -> None:
    spec = default_spec(bench)
    layout = bench.backend.kv_layout(spec)
    least = random_blocks(bench.rng, spec, 1).data.nbytes
    if layout.spec != spec or not layout.id:
        raise Failure(f"layout is of {layout.spec} with id `{layout.id}`")
    if layout.bytes_per_block < least:
        raise Failure(f"bytes_per_block is {layout.bytes_per_block}, a block holds {least}")
    if layout != bench.backend.kv_layout(spec):
        raise Failure("the same spec gives two layouts")
