"""Picking tokens, batched over rows, exactly as `SamplingBatch` documents it.

Rows stay in token-id order throughout, so the inverse CDF needs no gather back. Each truncation
works on what the one before it left, renormalised; the more likely token, then the lower id, is
kept first.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halogen_core.spi.step import Sampled, SamplingBatch
from halogen_core.torch_backend.truncation import most_likely, truncate

_SLAB = 1 << 17
"""Logits worked on at once on a CPU: half a MiB stays in cache and needs no new pages."""


@attrs.frozen(eq=False)
class SamplingTensors:
    """The device form of a `SamplingBatch`: only what this step needs, by field name."""

    tensors: dict[str, Tensor]

    @staticmethod
    def host_arrays(batch: SamplingBatch) -> dict[str, NDArray[Any]]:
        """What to upload; rows of CSR entries are expanded to one row index per entry."""
        arrays: dict[str, NDArray[Any]] = {}
        if batch.history_ids.size:
            arrays["history_rows"] = _rows_of(batch.history_start)
            arrays["history_ids"] = batch.history_ids.astype(np.int64)
            arrays["history_counts"] = batch.history_counts
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
                arrays[name] = getattr(batch, name)
        if batch.bias_ids.size:
            arrays["bias_rows"] = _rows_of(batch.bias_start)
            arrays["bias_ids"] = batch.bias_ids.astype(np.int64)
            arrays["bias_values"] = batch.bias_values
        if batch.mask is not None:
            arrays["mask"] = batch.mask.view(np.int32)
        sampled = np.flatnonzero(batch.temperature > 0)
        if sampled.size:
            arrays["sampled_rows"] = sampled
            for name in ("temperature", "top_k", "top_p", "min_p", "uniforms"):
                arrays[name] = getattr(batch, name)[sampled]
        if (batch.forced >= 0).any():
            arrays["forced"] = batch.forced
        return arrays


def sample(logits: Tensor, batch: SamplingBatch, device: SamplingTensors) -> Sampled[Tensor]:
    """A token for each row of logits [R, V] float32."""
    given = device.tensors
    adjusted = _adjust(logits, given)
    best, ids = adjusted.max(-1)
    if "sampled_rows" in given:
        rows = given["sampled_rows"]
        chosen = adjusted if rows.numel() == len(logits) else adjusted.index_select(0, rows)
        ids = ids.index_copy(0, rows, _draw(chosen, batch, given))
    # not finite (a NaN, or every token masked): no token, which the engine reports
    ids = torch.where(best.isfinite(), ids, -1)
    if "forced" in given:
        ids = torch.where(given["forced"] >= 0, given["forced"], ids)
    if batch.num_logprobs < 0:
        return Sampled(token_ids=ids.int())
    slabs = [
        _logprobs(logits[slab], ids[slab], batch.num_logprobs)
        for slab in _slabs(logits) or [slice(None)]
    ]
    own, top_ids, top = (torch.cat(parts) for parts in zip(*slabs, strict=True))
    return Sampled(
        token_ids=ids.int(),
        logprobs=own,
        top_ids=top_ids if batch.num_logprobs else None,
        top_logprobs=top if batch.num_logprobs else None,
    )


def _slabs(rows: Tensor) -> list[slice]:
    """Rows to work on at once: all of them, on a CPU as many as stay in its cache."""
    count = len(rows)
    step = count if rows.device.type != "cpu" else max(1, _SLAB // max(1, rows.shape[1]))
    return [slice(start, start + step) for start in range(0, count, max(1, step))]


def _logprobs(logits: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of `ids` [R]; ids int32 and log-probabilities of the `count` likeliest."""
    peak = logits.amax(-1, keepdim=True)
    # log-softmax of the few tokens that are reported, without writing all of it
    log_total = (logits - peak).exp_().sum(-1, keepdim=True).log_()
    own = logits.gather(1, ids.long().clamp_min(0).unsqueeze(1)) - peak - log_total
    top_ids, top = most_likely(logits, count)
    return own.squeeze(1), top_ids.int(), top - peak - log_total


def _rows_of(starts: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(starts) - 1, dtype=np.int64), np.diff(starts))


def _adjust(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Logits after penalties, bias and mask; the given tensor is not changed."""
    if "history_ids" in given or "bias_ids" in given:
        logits = logits.clone()
    if "history_ids" in given:
        _penalise(logits, given)
    if "bias_ids" in given:
        at = (given["bias_rows"], given["bias_ids"])
        logits.index_put_(at, given["bias_values"], accumulate=True)
    if "mask" in given:
        logits = logits.masked_fill(~_unpack_mask(given["mask"], logits.shape[1]), -torch.inf)
    return logits


def _penalise(logits: Tensor, given: dict[str, Tensor]) -> None:
    """Repetition (Keskar et al., CTRL, 2019), presence and frequency penalties, in place."""
    rows, ids, counts = given["history_rows"], given["history_ids"], given["history_counts"]
    values = logits[rows, ids]
    repetition = given["repetition_penalty"][rows]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - given["frequency_penalty"][rows] * counts
    values = values - given["presence_penalty"][rows] * (counts > 0)
    logits.index_put_((rows, ids), values)


def _unpack_mask(words: Tensor, vocab: int) -> Tensor:
    """Bits [R, ceil(V / 32)] of int32 words as bool [R, V]."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(1)[:, :vocab].bool()


def _draw(logits: Tensor, batch: SamplingBatch, given: dict[str, Tensor]) -> Tensor:
    """A token id int64 for each sampled row by temperature, truncation and inverse CDF."""
    truncated = bool((batch.top_k > 0).any() or (batch.top_p < 1).any())
    parts = []
    for slab in _slabs(logits):
        probabilities = (logits[slab] / given["temperature"][slab].unsqueeze(1)).softmax(-1)
        if truncated:
            probabilities = truncate(probabilities, given["top_k"][slab], given["top_p"][slab])
        if (batch.min_p > 0).any():
            least = probabilities.amax(-1, keepdim=True) * given["min_p"][slab].unsqueeze(1)
            probabilities.masked_fill_(probabilities < least, 0)
        # float64: a float32 running sum over 150,000 tokens is off by more than many tokens' mass
        running = probabilities.cumsum(-1, dtype=torch.float64)
        target = given["uniforms"][slab].double().unsqueeze(1) * running[:, -1:]
        parts.append(torch.searchsorted(running, target, right=True).squeeze(1))
    return torch.cat(parts)
