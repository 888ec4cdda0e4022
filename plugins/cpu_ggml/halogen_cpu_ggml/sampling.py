"""Picking tokens from logits on the host, row by row in numpy; the kernels' version has the same
rules (`SamplingBatch`) and is tested against this one.
"""

from __future__ import annotations

from typing import Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.spi import SamplingBatch
from halogen_cpu_ggml.tape import Node, view_f32

PICKER = "picker"
"""Where a recorded tape keeps it."""

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]


@attrs.frozen
class Choice:
    """Tokens [R] and, where asked for, log-probabilities [R], [R, n]."""

    token_ids: Ids
    logprobs: Floats | None = None
    top_ids: Ids | None = None
    top_logprobs: Floats | None = None


class Picker(Protocol):
    """How a recorded step picks its tokens."""

    def load(self, batch: SamplingBatch) -> None:
        """Before the graph runs."""
        ...

    def result(self, batch: SamplingBatch) -> Choice:
        """After it has run."""
        ...


@attrs.define(eq=False)
class AfterGraph:
    """Picks in numpy from the graph's logits."""

    logits: Node

    def load(self, batch: SamplingBatch) -> None:
        """Nothing to lay ready."""

    def result(self, batch: SamplingBatch) -> Choice:
        return sample(view_f32(self.logits)[: batch.num_rows], batch)


def sample(logits: Floats, batch: SamplingBatch) -> Choice:
    """A token per row of logits [R, V]."""
    rows = range(batch.num_rows)
    tokens = np.array([_pick(logits[r], batch, r) for r in rows], np.int32)
    tokens = np.where(batch.forced >= 0, batch.forced, tokens).astype(np.int32)
    if batch.num_logprobs < 0:
        return Choice(tokens)
    return with_logprobs(logits, tokens, batch.num_logprobs)


def with_logprobs(logits: Floats, tokens: Ids, count: int) -> Choice:
    """Log-probabilities of the model's own distribution: of `tokens` and the `count` likeliest."""
    logs = log_softmax(logits)
    chosen = logs[np.arange(len(tokens)), tokens]
    if count == 0:
        return Choice(tokens, chosen)
    top = np.argsort(-logs, axis=1, kind="stable")[:, :count].astype(np.int32)
    return Choice(tokens, chosen, top, np.take_along_axis(logs, top, axis=1))


def log_softmax(logits: Floats) -> Floats:
    """Over the last axis, summed in float64."""
    shifted = logits - logits.max(axis=-1, keepdims=True, initial=-np.inf)
    total = np.exp(shifted, dtype=np.float64).sum(axis=-1, keepdims=True)
    logs: Floats = (shifted - np.log(total)).astype(np.float32)
    return logs


def adjusted(logits: Floats, batch: SamplingBatch, r: int) -> Floats:
    """Row r after penalties, bias and mask."""
    out = logits.astype(np.float32, copy=True)
    span = slice(batch.history_start[r], batch.history_start[r + 1])
    ids, counts = batch.history_ids[span], batch.history_counts[span]
    if len(ids):
        penalty, seen = batch.repetition_penalty[r], out[ids]
        seen = np.where(seen > 0, seen / penalty, seen * penalty)
        present = batch.presence_penalty[r] * (counts > 0)
        out[ids] = seen - present - batch.frequency_penalty[r] * counts
    span = slice(batch.bias_start[r], batch.bias_start[r + 1])
    np.add.at(out, batch.bias_ids[span], batch.bias_values[span])
    if batch.mask is not None:
        bits = np.unpackbits(batch.mask[r].view(np.uint8), bitorder="little")[: len(out)]
        out[bits == 0] = -np.inf
    return out


def _pick(logits: Floats, batch: SamplingBatch, r: int) -> int:
    row = adjusted(logits, batch, r)
    if batch.temperature[r] == 0:
        return int(row.argmax())
    scaled = row.astype(np.float64) / batch.temperature[r]
    chances = np.exp(scaled - scaled.max())
    chances /= chances.sum()
    kept = _truncated(chances, int(batch.top_k[r]), float(batch.top_p[r]), float(batch.min_p[r]))
    running = np.cumsum(kept)
    return int(np.searchsorted(running, batch.uniforms[r] * running[-1], side="right"))


def _truncated(
    chances: NDArray[np.float64], top_k: int, top_p: float, min_p: float
) -> NDArray[np.float64]:
    """Zero what top-k, top-p and min-p leave out."""
    if 0 < top_k < len(chances) or top_p < 1:
        order = np.argsort(-chances, kind="stable")
        if 0 < top_k < len(chances):
            chances = chances.copy()
            chances[order[top_k:]] = 0
            chances /= chances.sum()
        if top_p < 1:
            before = np.cumsum(chances[order]) - chances[order]
            chances = chances.copy()
            chances[order[before >= top_p]] = 0
    if min_p > 0:
        chances = np.where(chances >= min_p * chances.max(), chances, 0)
    return chances
