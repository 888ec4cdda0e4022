"""Picking tokens, row by row as vector tasks do it; the rule is `SamplingBatch`'s docstring."""

from __future__ import annotations

import numpy as np
import torch

from halogen_core.spi import SamplingBatch


def pick(logits: torch.Tensor, batch: SamplingBatch, row: int) -> int:
    """The token of one row of logits [V] float32."""
    if batch.forced[row] >= 0:
        return int(batch.forced[row])
    adjusted = _adjust(logits.clone(), batch, row)
    temperature = float(batch.temperature[row])
    if temperature == 0:
        return int(adjusted.argmax())
    probabilities = torch.softmax(adjusted / temperature, -1)
    kept = _truncate(probabilities, batch, row)
    running = kept.cumsum(-1, dtype=torch.float64)
    target = float(batch.uniforms[row]) * running[-1]
    found = int(torch.searchsorted(running, target, right=True))
    return min(found, len(logits) - 1)


def top(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int32 and values of the `count` most likely, the lower id first among equals."""
    order = torch.sort(logprobs, descending=True, stable=True)
    return order.indices[:count].int(), order.values[:count]


def _adjust(logits: torch.Tensor, batch: SamplingBatch, row: int) -> torch.Tensor:
    """Penalties (repetition: Keskar et al., CTRL, 2019), then bias, then mask; in place."""
    seen = slice(batch.history_start[row], batch.history_start[row + 1])
    if ids := batch.history_ids[seen].tolist():
        counts = torch.from_numpy(batch.history_counts[seen].astype(np.float32))
        values, repetition = logits[ids], float(batch.repetition_penalty[row])
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= float(batch.frequency_penalty[row]) * counts
        logits[ids] = values - float(batch.presence_penalty[row]) * (counts > 0)
    given = slice(batch.bias_start[row], batch.bias_start[row + 1])
    if ids := batch.bias_ids[given].tolist():
        logits.index_add_(0, torch.tensor(ids), torch.from_numpy(batch.bias_values[given].copy()))
    if batch.mask is not None:
        bits = np.unpackbits(batch.mask[row].view(np.uint8), bitorder="little")[: len(logits)]
        logits.masked_fill_(torch.from_numpy(bits == 0), -torch.inf)
    return logits


def _truncate(probabilities: torch.Tensor, batch: SamplingBatch, row: int) -> torch.Tensor:
    """Top-k, then top-p of what is left, then min-p: what goes is set to zero."""
    top_k, top_p, min_p = int(batch.top_k[row]), float(batch.top_p[row]), float(batch.min_p[row])
    if top_k > 0 or top_p < 1:
        order = torch.sort(probabilities, descending=True, stable=True)
        keep = len(probabilities) if top_k <= 0 else min(top_k, len(probabilities))
        running = order.values[:keep].cumsum(-1, dtype=torch.float64)
        # a token stays while the mass before it has not reached top_p
        keep = 1 + int((running[:-1] < top_p * running[-1]).sum())
        mask = torch.zeros_like(probabilities, dtype=torch.bool)
        mask[order.indices[:keep]] = True
        probabilities = torch.where(mask, probabilities, 0.0)
    if min_p > 0:
        least = probabilities.max() * min_p
        probabilities = torch.where(probabilities >= least, probabilities, 0.0)
    return probabilities
