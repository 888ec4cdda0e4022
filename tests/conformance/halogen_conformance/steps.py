"""Building one step for a case: sequences, shuffled block tables, KV pools with canaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from halogen_conformance.bench import Bench, same_bits
from halogen_conformance.case import Filtered
from halogen_conformance.oracle.numbers import Values, kv_bytes, kv_values
from halogen_conformance.oracle.sampling import Policy
from halogen_core.spi import (
    KVBlocks,
    KVCache,
    KVSpec,
    SamplingBatch,
    StepBatch,
    kv_block_shape,
)


@attrs.frozen(kw_only=True)
class Span:
    """One sequence in a step: `length` tokens after it, of which the last `queries` are new."""

    length: int
    queries: int


def spans(*pairs: tuple[int, int]) -> tuple[Span, ...]:
    """(length, queries) pairs as spans."""
    return tuple(Span(length=length, queries=queries) for length, queries in pairs)


def sampling_batch(policies: Sequence[Policy], vocab: int, num_logprobs: int = -1) -> SamplingBatch:
    """The host record of rows' policies."""

    def column(name: str, kind: type) -> Any:
        return np.array([getattr(p, name) for p in policies], kind)

    def starts(name: str) -> Any:
        lengths = [len(getattr(p, name)) for p in policies]
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

    history = [entry for p in policies for entry in p.history]
    bias = [entry for p in policies for entry in p.bias]
    return SamplingBatch(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        presence_penalty=column("presence_penalty", np.float32),
        frequency_penalty=column("frequency_penalty", np.float32),
        uniforms=column("uniform", np.float32),
        forced=column("forced", np.int32),
        history_start=starts("history"),
        history_ids=np.array([t for t, _ in history], np.int32),
        history_counts=np.array([c for _, c in history], np.int32),
        bias_start=starts("bias"),
        bias_ids=np.array([t for t, _ in bias], np.int32),
        bias_values=np.array([v for _, v in bias], np.float32),
        mask=_mask(policies, vocab),
        num_logprobs=num_logprobs,
    )


def _mask(policies: Sequence[Policy], vocab: int) -> Any:
    if all(p.allowed is None for p in policies):
        return None
    words = -(-vocab // 32)
    bits = np.ones((len(policies), words * 32), bool)
    for row, policy in zip(bits, policies, strict=True):
        if policy.allowed is not None:
            row[:] = False
            row[list(policy.allowed)] = True
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


@attrs.frozen(kw_only=True)
class Plan:
    """Where the sequences of a step live."""

    spans: tuple[Span, ...]
    block_size: int
    tables: Values
    """[S, M], unused -1."""
    num_blocks: int

    def slots(self, sequence: int, positions: Values) -> Values:
        """Slots of positions of a sequence."""
        blocks = self.tables[sequence, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size


def arrange(
    rng: np.random.Generator,
    which: Sequence[Span],
    block_size: int,
    *,
    spare: int = 5,
    extra_columns: int = 2,
) -> Plan:
    """Shuffled blocks for every sequence, `spare` more that nobody owns, wider tables than needed."""
    counts = [-(-span.length // block_size) for span in which]
    num_blocks = sum(counts) + spare
    order = rng.permutation(num_blocks)
    tables = np.full((len(counts), max(counts, default=0) + extra_columns), -1, np.int32)
    at = 0
    for row, count in zip(tables, counts, strict=True):
        row[:count] = order[at : at + count]
        at += count
    return Plan(
        spans=tuple(which), block_size=block_size, tables=tables, num_blocks=int(num_blocks)
    )


def batch_of(
    plan: Plan,
    *,
    token_ids: Values | None = None,
    logit_rows: Values | None = None,
    sampling: SamplingBatch | None = None,
) -> StepBatch:
    """The step that computes the new tokens of every span."""
    queries = np.array([s.queries for s in plan.spans], np.int32)
    lengths = np.array([s.length for s in plan.spans], np.int32)
    positions = [np.arange(s.length - s.queries, s.length) for s in plan.spans]
    slots = [plan.slots(i, p) for i, p in enumerate(positions)]
    total = int(queries.sum())
    rows = np.cumsum(queries)[queries > 0] - 1 if logit_rows is None else logit_rows
    return StepBatch(
        token_ids=np.zeros(total, np.int32) if token_ids is None else token_ids.astype(np.int32),
        positions=np.concatenate([*positions, np.zeros(0)]).astype(np.int32),
        slot_mapping=np.concatenate([*slots, np.zeros(0)]).astype(np.int64),
        query_start_loc=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        seq_lens=lengths,
        block_tables=plan.tables,
        logit_rows=np.asarray(rows, np.int32),
        sampling=sampling or sampling_batch([Policy()] * len(rows), 1),
    )


# ---------------------------------------------------------------- pools


def pool(bench: Bench, spec: KVSpec, num_blocks: int) -> KVCache:
    """An allocated pool; FILTERED when the backend does not claim its dtype or block size."""
    claims = bench.capabilities
    bench.require(spec.dtype in claims.kv_dtypes, f"kv_dtypes:{spec.dtype}")
    bench.require(spec.block_size in claims.kv_block_sizes, f"kv_block_sizes:{spec.block_size}")
    if claims.head_dims and spec.head_dim not in claims.head_dims:
        raise Filtered(f"head_dims:{spec.head_dim}")
    return bench.backend.kv_alloc(bench.backend.kv_layout(spec), num_blocks)


def canonical(values: Values, spec: KVSpec) -> KVBlocks:
    """Values [n, L, 2, B, Hkv, D] as canonical blocks."""
    return KVBlocks(spec=spec, data=kv_bytes(values, spec.dtype))


def random_blocks(rng: np.random.Generator, spec: KVSpec, n: int, std: float = 1.0) -> KVBlocks:
    """Blocks of normal values."""
    shape = (*kv_block_shape(spec, n)[:-1], spec.head_dim)
    return canonical(rng.standard_normal(shape) * std, spec)


def nan_blocks(spec: KVSpec, n: int) -> KVBlocks:
    """Blocks of NaN, the worst that a slot nobody owns can hold."""
    if spec.dtype == "q8_0":
        data = np.zeros(kv_block_shape(spec, n), np.uint8)
        cells = data.reshape(-1, 34)
        cells[:, :2] = np.array([np.nan], np.float16).view(np.uint8)
        cells[:, 2:] = 1
        return KVBlocks(spec=spec, data=data)
    shape = (*kv_block_shape(spec, n)[:-1], spec.head_dim)
    data = kv_bytes(np.full(shape, np.nan), spec.dtype)
    if spec.dtype == "f8_e5m2":
        data[:] = 0x7F
    return KVBlocks(spec=spec, data=data)


@attrs.frozen(kw_only=True)
class Filled:
    """A pool whose sequences hold known values and whose every other slot is NaN."""

    kv: KVCache
    plan: Plan
    blocks: KVBlocks
    """What was imported, all blocks in order."""

    def values(self, sequence: int, layer: int) -> tuple[Values, Values]:
        """Keys and values [s, Hkv, D] of a sequence as stored."""
        length = self.plan.spans[sequence].length
        positions = np.arange(length)
        blocks = self.plan.tables[sequence, positions // self.plan.block_size]
        rows = self.blocks.data[blocks, layer, :, positions % self.plan.block_size]
        both = kv_values(rows, self.blocks.spec.dtype)
        return both[:, 0], both[:, 1]

    def unchanged_except(self, bench: Bench, slots: Values, what: str) -> None:
        """Every slot outside `slots`, of every layer and block, still holds what was there."""
        everything = list(range(self.kv.num_blocks))
        after = bench.backend.kv_export(self.kv, everything).data.copy()
        expected = self.blocks.data.copy()
        size = self.plan.block_size
        at = np.asarray(slots, np.int64)
        expected[at // size, :, :, at % size] = 0
        after[at // size, :, :, at % size] = 0
        same_bits(after, expected, what)


def fill(bench: Bench, plan: Plan, spec: KVSpec, *, std: float = 1.0) -> Filled:
    """Give every sequence random history; blocks and rows that nobody owns hold NaN."""
    kv = pool(bench, spec, plan.num_blocks)
    blocks = nan_blocks(spec, plan.num_blocks)
    data = blocks.data
    history = random_blocks(bench.rng, spec, plan.num_blocks, std).data
    for sequence, span in enumerate(plan.spans):
        positions = np.arange(span.length)
        owned = plan.tables[sequence, positions // plan.block_size]
        offset = positions % plan.block_size
        data[owned, :, :, offset] = history[owned, :, :, offset]
    if plan.num_blocks:
        bench.backend.kv_import(kv, list(range(plan.num_blocks)), blocks)
    return Filled(kv=kv, plan=plan, blocks=blocks)
