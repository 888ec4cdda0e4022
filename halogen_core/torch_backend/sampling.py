"""Picking tokens, batched over rows, exactly as `SamplingBatch` documents it.

Truncations are thresholds on probabilities, never a reordering: rows stay in token-id order, so
the inverse CDF needs no gather back. Each truncation works on what the one before it left,
renormalised; the more likely token, then the lower id, is kept first.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halogen_core.spi.step import Sampled, SamplingBatch

_CANDIDATES = 1024
"""Tokens looked at first when truncating on the host; rows that need more are sorted whole."""


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
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, ids.long().clamp_min(0).unsqueeze(1)).squeeze(1)
    top = most_likely(logprobs, batch.num_logprobs) if batch.num_logprobs else (None, None)
    return Sampled(token_ids=ids.int(), logprobs=own, top_ids=top[0], top_logprobs=top[1])


def most_likely(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids int32 and values of the `count` largest of each row; the lower id first among equals."""
    count = min(count, values.shape[1])
    least = values.topk(count, dim=-1).values[:, -1:]
    above, equal = values > least, values == least
    room = count - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1) <= room))
    ids = kept.nonzero()[:, 1].view(len(values), count)
    ordered, at = torch.sort(values.gather(1, ids), dim=-1, descending=True, stable=True)
    return ids.gather(1, at).int(), ordered


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
    scaled = logits / given["temperature"].unsqueeze(1)
    probabilities = scaled.softmax(-1)
    if (batch.top_k > 0).any() or (batch.top_p < 1).any():
        probabilities = _truncate(probabilities, given)
    if (batch.min_p > 0).any():
        least = probabilities.amax(-1, keepdim=True) * given["min_p"].unsqueeze(1)
        probabilities = torch.where(probabilities >= least, probabilities, 0)
    # float64: a float32 running sum over 150,000 tokens is off by more than many tokens' mass
    running = probabilities.cumsum(-1, dtype=torch.float64)
    target = given["uniforms"].double().unsqueeze(1) * running[:, -1:]
    return torch.searchsorted(running, target, right=True).squeeze(1)


def _truncate(probabilities: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Rows with everything outside top-k, then top-p of the rest, set to zero."""
    vocab = probabilities.shape[1]
    top_k = given["top_k"].long()
    top_k = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k).unsqueeze(1)
    top_p = given["top_p"].double().unsqueeze(1)
    looked_at = vocab
    if probabilities.device.type == "cpu" and vocab > _CANDIDATES:
        looked_at = _CANDIDATES
    kept, largest = _kept(probabilities, top_k, top_p, looked_at)
    if looked_at < vocab and bool((kept >= looked_at).any()):
        kept, largest = _kept(probabilities, top_k, top_p, vocab)
    least = largest.gather(1, kept - 1)
    above, equal = probabilities > least, probabilities == least
    room = kept - above.sum(-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(-1) <= room))
    return torch.where(keep, probabilities, 0)


def _kept(
    probabilities: Tensor, top_k: Tensor, top_p: Tensor, looked_at: int
) -> tuple[Tensor, Tensor]:
    """How many tokens each row keeps, at least 1 and at most `looked_at`; its largest, sorted."""
    largest = probabilities.topk(looked_at, dim=-1).values
    running = largest.cumsum(-1, dtype=torch.float64)
    in_top_k = torch.minimum(top_k, torch.full_like(top_k, looked_at))
    whole = probabilities.sum(-1, keepdim=True, dtype=torch.float64)
    mass = torch.where(top_k < looked_at, running.gather(1, in_top_k - 1), whole)
    # a token is kept while the mass before it has not reached top_p
    kept = 1 + (running[:, :-1] < top_p * mass).sum(-1, keepdim=True)
    return torch.minimum(kept, in_top_k), largest
