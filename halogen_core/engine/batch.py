"""From scheduled sequences to the flat arrays of one step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import attrs
import numpy as np

from halogen_core.engine.sampler import RowSampler, SamplingRow, sampling_batch
from halogen_core.spi import Carried, StepBatch, StepShape
from halogen_core.spi.arrays import Int32


@attrs.frozen(kw_only=True, eq=False)
class BatchItem:
    """One sequence's share of a step: tokens start .. start + count - 1 are computed."""

    token_ids: Sequence[int]
    start: int
    count: int
    block_table: Sequence[int]
    sampler: RowSampler
    samples: bool
    """Whether the last of these tokens is the sequence's last, so that a new one is picked."""
    prompt_logprobs: int = 0
    """Length of the prompt if its log-probabilities are wanted, else 0."""
    carried: int = -1
    """The row of the step before that picks the last of these tokens; -1: all are known."""

    @property
    def end(self) -> int:
        return self.start + self.count


@attrs.frozen(eq=False)
class Row:
    """Whose a row of logits is: item index and the position of the token it is about."""

    item: int
    position: int
    is_prompt: bool


@attrs.frozen(eq=False)
class Step:
    """A batch and the meaning of its rows."""

    batch: StepBatch
    rows: tuple[Row, ...]
    shape: StepShape


def build_step(items: Sequence[BatchItem], block_size: int, before: Any = None) -> Step:
    """The step that computes `items`, in order; `before`: the tokens that items carry over."""
    counts = np.array([item.count for item in items], np.int32)
    ends = np.array([item.end for item in items], np.int32)
    starts = np.zeros(len(items) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    tables = _tables([item.block_table for item in items])
    positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(ends - starts[1:], counts)
    blocks = tables[np.repeat(np.arange(len(items)), counts), positions // block_size]
    wanted = [w for i, item in enumerate(items) for w in _rows(i, item, int(starts[i]))]
    batch = StepBatch(
        token_ids=_token_ids(items, int(starts[-1])),
        positions=positions,
        slot_mapping=blocks.astype(np.int64) * block_size + positions % block_size,
        query_start_loc=starts,
        seq_lens=ends,
        block_tables=tables,
        logit_rows=np.array([at for at, _, _ in wanted], np.int32),
        sampling=sampling_batch([row for _, _, row in wanted]),
        carried=_carried(items, starts, before),
    )
    return Step(batch, tuple(row for _, row, _ in wanted), step_shape(items))


def _token_ids(items: Sequence[BatchItem], total: int) -> Int32:
    if total == len(items):
        return np.array([item.token_ids[item.start] for item in items], np.int32)
    texts = (item.token_ids[item.start : item.end] for item in items)
    return np.fromiter(chain.from_iterable(texts), np.int32, count=total)


def _tables(rows: Sequence[Sequence[int]]) -> Int32:
    """[S, M] from block tables of any lengths."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tables = np.full((len(rows), lengths.max(initial=0)), -1, np.int32)
    flat = np.fromiter(chain.from_iterable(rows), np.int32, count=int(lengths.sum()))
    tables[np.arange(tables.shape[1]) < lengths[:, None]] = flat
    return tables


def _carried(items: Sequence[BatchItem], starts: Int32, before: Any) -> Carried | None:
    if before is None or all(item.carried < 0 for item in items):
        return None
    rows = np.full(starts[-1], -1, np.int32)
    rows[starts[1:] - 1] = [item.carried for item in items]
    return Carried(rows=rows, tokens=before)


def step_shape(items: Sequence[BatchItem]) -> StepShape:
    """The step's size for the cost model; one token of a sequence with history is decode."""
    prompts = [item for item in items if item.count > 1 or not item.start]
    decodes = len(items) - len(prompts)
    return StepShape(
        prefill_tokens=sum(item.count for item in prompts),
        decode_sequences=decodes,
        kv_tokens=sum(item.end for item in items),
        prefill_pairs=sum(item.count * (item.start + item.end + 1) // 2 for item in prompts),
    )


def _rows(index: int, item: BatchItem, first: int) -> list[tuple[int, Row, SamplingRow]]:
    rows = []
    if item.prompt_logprobs:
        for at in range(item.start, min(item.end, item.prompt_logprobs - 1)):
            forced = SamplingRow(item.sampler, at + 1, int(item.token_ids[at + 1]))
            rows.append((first + at - item.start, Row(index, at + 1, True), forced))
    if item.samples:
        row = SamplingRow(item.sampler, item.end)
        rows.append((first + item.count - 1, Row(index, item.end, False), row))
    return rows
