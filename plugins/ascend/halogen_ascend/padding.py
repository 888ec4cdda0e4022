"""Padding a decode step to a bucket: rows that change nothing, with a block of their own."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from halogen_core.spi import SamplingBatch, StepBatch

STEP_ARRAYS = (
    *("token_ids", "positions", "slot_mapping", "query_start_loc"),
    *("seq_lens", "block_tables", "logit_rows"),
)
"""Fields of a step that have a device side, refilled at each replay."""


@attrs.frozen(kw_only=True)
class TrashBlock:
    """Where padding rows read and write: a block beyond those the core knows of."""

    block: int
    size: int
    """Tokens."""


@attrs.frozen(kw_only=True, eq=False)
class PaddedStep(StepBatch):
    """A step of which sequences from `real` on are padding; only it may name the trash block."""

    real: int


def pad(batch: StepBatch, size: int, trash: TrashBlock) -> StepBatch:
    """`batch` with `size` sequences; the new ones read and write the trash block."""
    extra = size - batch.num_sequences
    width = table_width(batch.block_tables.shape[1])
    tables = np.full((size, width), -1, dtype=np.int32)
    tables[: batch.num_sequences, : batch.block_tables.shape[1]] = batch.block_tables
    tables[batch.num_sequences :, 0] = trash.block
    slots = trash.block * trash.size + np.arange(extra) % trash.size
    return PaddedStep(
        real=batch.num_sequences,
        token_ids=_grow(batch.token_ids, np.zeros(extra)),
        positions=_grow(batch.positions, np.zeros(extra)),
        slot_mapping=_grow(batch.slot_mapping, slots),
        query_start_loc=_grow(
            batch.query_start_loc, batch.query_start_loc[-1] + 1 + np.arange(extra)
        ),
        seq_lens=_grow(batch.seq_lens, np.ones(extra)),
        block_tables=tables,
        logit_rows=_grow(batch.logit_rows, batch.num_tokens + np.arange(extra)),
        sampling=_pad_sampling(batch.sampling, extra),
    )


def table_width(blocks: int) -> int:
    """Columns of a captured step's block tables: the next power of two, so that growth is rare."""
    return 1 << max(blocks - 1, 0).bit_length()


def _pad_sampling(sampling: SamplingBatch, extra: int) -> SamplingBatch:
    neutral = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "uniforms": 0.0,
        "forced": 0,
    }
    rows = {
        name: _grow(getattr(sampling, name), np.full(extra, value))
        for name, value in neutral.items()
    }
    starts = {
        name: _grow(getattr(sampling, name), np.full(extra, getattr(sampling, name)[-1]))
        for name in ("history_start", "bias_start")
    }
    mask = sampling.mask
    if mask is not None:
        mask = np.concatenate([mask, np.full((extra, mask.shape[1]), 0xFFFFFFFF, dtype=np.uint32)])
    fields: dict[str, Any] = {**rows, **starts, "mask": mask}
    return attrs.evolve(sampling, **fields)


def _grow(values: np.ndarray, more: np.ndarray) -> np.ndarray:
    return np.concatenate([values, more.astype(values.dtype)])
