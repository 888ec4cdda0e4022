"""For tests of the core, of plugins and of the conformance suite: models, steps, opaque arrays."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import attrs
import numpy as np

from halogen_core.spi import SamplingBatch, StepBatch
from halogen_core.spi.tiny_models import (
    TINY_MODELS,
    MemoryCheckpoint,
    TinyModel,
    f32_tensor,
    quantised,
    tiny_checkpoint,
)

__all__ = [
    "TINY_MODELS",
    "MemoryCheckpoint",
    "Share",
    "TinyModel",
    "f32_tensor",
    "greedy_sampling",
    "quantised",
    "step_batch",
    "tiny_checkpoint",
]


def greedy_sampling(rows: int, **changes: Any) -> SamplingBatch:
    """Neutral sampling of `rows` rows, with `changes`."""
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    fields: dict[str, Any] = {
        "temperature": zeros,
        "top_k": np.zeros(rows, np.int32),
        "top_p": ones,
        "min_p": zeros,
        "repetition_penalty": ones,
        "presence_penalty": zeros,
        "frequency_penalty": zeros,
        "uniforms": zeros,
        "forced": np.full(rows, -1, np.int32),
        "history_start": np.zeros(rows + 1, np.int32),
        "history_ids": np.zeros(0, np.int32),
        "history_counts": np.zeros(0, np.int32),
        "bias_start": np.zeros(rows + 1, np.int32),
        "bias_ids": np.zeros(0, np.int32),
        "bias_values": np.zeros(0, np.float32),
    }
    return SamplingBatch(**{**fields, **changes})


@attrs.frozen(kw_only=True)
class Share:
    """One sequence's share of a test step: tokens start .. start + len(tokens) - 1."""

    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    start: int = 0
    all_logits: bool = False
    """Logits of every token, else of the last."""


def step_batch(
    shares: list[Share], block_size: int, *, sampling: SamplingBatch | None = None
) -> StepBatch:
    """A step of these shares, in order; greedy unless `sampling` is given."""
    counts = [len(share.tokens) for share in shares]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    where = [np.arange(share.start, share.start + len(share.tokens)) for share in shares]
    positions = np.concatenate([*where, np.zeros(0, np.int64)]).astype(np.int32)
    slots = [
        np.array(share.blocks, np.int64)[at // block_size] * block_size + at % block_size
        for share, at in zip(shares, where, strict=True)
    ]
    width = max((len(share.blocks) for share in shares), default=0)
    tables = np.full((len(shares), width), -1, np.int32)
    for row, share in zip(tables, shares, strict=True):
        row[: len(share.blocks)] = share.blocks
    rows = [
        row
        for share, begin, end in zip(shares, starts[:-1], starts[1:], strict=True)
        for row in range(begin if share.all_logits else end - 1, end)
    ]
    return StepBatch(
        token_ids=np.array([t for share in shares for t in share.tokens], np.int32),
        positions=positions,
        slot_mapping=np.concatenate([*slots, np.zeros(0, np.int64)]).astype(np.int64),
        query_start_loc=starts,
        seq_lens=np.array([s.start + len(s.tokens) for s in shares], np.int32),
        block_tables=tables,
        logit_rows=np.array(rows, np.int32),
        sampling=sampling or greedy_sampling(len(rows)),
    )


def __getattr__(name: str) -> Any:
    """`Handle` and `OpaqueBackend`; only they need torch, which takes seconds to import."""
    if name in ("Handle", "OpaqueBackend"):
        return getattr(import_module("halogen_core.spi.opaque"), name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
