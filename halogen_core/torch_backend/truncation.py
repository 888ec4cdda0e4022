"""Top-k and top-p as thresholds on probabilities: rows are filtered where they stand.

Which values matter is found cheaply. Sorting a vocabulary costs more than the rest of sampling, so
on the host each kind of row gets the least work that is still exact; other devices sort.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SMALL_K = 256
"""Up to here torch's topk is a heap over one pass; above, it is slower than sorting."""


def truncate(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Rows [R, V] with all but top-k, then top-p of what is left, set to zero (may be in place).

    `top_k` int32 [R] 0 and `top_p` float32 [R] 1 keep everything. The likeliest token stays.
    """
    vocab = probabilities.shape[1]
    ks = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k).long()
    if probabilities.device.type != "cpu":
        first = probabilities.sort(dim=-1, descending=True).values
        return _filter(probabilities, first, ks, top_p)
    makers = (_sorted_small, _sorted_nucleus, _sorted_whole)
    for make, rows in zip(makers, _kinds(ks.numpy(), top_p.numpy(), vocab), strict=True):
        if len(rows) == len(ks):
            return _filter(probabilities, make(probabilities, ks, top_p), ks, top_p)
        if len(rows):
            at = torch.from_numpy(rows)
            some, k, p = probabilities[at], ks[at], top_p[at]
            probabilities.index_copy_(0, at, _filter(some, make(some, k, p), k, p))
    return probabilities


def _kinds(
    ks: NDArray[np.int64], top_p: NDArray[np.float32], vocab: int
) -> tuple[NDArray[np.intp], ...]:
    """Rows with a small top-k, with top-p alone, with a big top-k; the rest keep everything."""
    small, free = ks <= _SMALL_K, ks == vocab
    nucleus = ~small & free & (top_p < 1)
    return np.flatnonzero(small), np.flatnonzero(nucleus), np.flatnonzero(~small & ~free)


def most_likely(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids int64 and values of the `count` largest of each row; the lower id first among equals."""
    count = min(count, values.shape[1])
    if not count or not len(values):
        none = values.new_zeros((len(values), count))
        return none.long(), none
    least = values.topk(count, dim=-1).values[:, -1:]
    kept = values >= least
    _drop_late_equals(kept, values, least, count)
    ids = kept.nonzero()[:, 1].view(len(values), count)
    ordered, at = torch.sort(values.gather(1, ids), dim=-1, descending=True, stable=True)
    return ids.gather(1, at), ordered


def _filter(probabilities: Tensor, first: Tensor, ks: Tensor, top_p: Tensor) -> Tensor:
    """Keep what the sorted largest values `first` [R, W] say; they hold all that is kept."""
    running = first.cumsum(-1, dtype=torch.float64)
    ks = ks.unsqueeze(1)
    within = ks.clamp_max(first.shape[1])
    whole = probabilities.sum(-1, keepdim=True, dtype=torch.float64)
    mass = torch.where(ks <= within, running.gather(1, within - 1), whole)
    # a token is kept while the mass before it has not reached top_p; 1 is never reached, however
    # the sums are rounded
    share = torch.where(top_p >= 1, torch.inf, top_p.double()).unsqueeze(1)
    reached = running[:, :-1] >= share * mass
    count = torch.minimum(first.shape[1] - reached.sum(-1, keepdim=True), within)
    least = first.gather(1, count - 1)
    kept = probabilities >= least
    _drop_late_equals(kept, probabilities, least, count)
    return probabilities.masked_fill_(~kept, 0)


def _sorted_small(probabilities: Tensor, ks: Tensor, top_p: Tensor) -> Tensor:
    return probabilities.topk(int(ks.max()), dim=-1).values


def _sorted_nucleus(probabilities: Tensor, ks: Tensor, top_p: Tensor) -> Tensor:
    """All values that top-p can keep, sorted downwards, rows padded with zeros.

    Tokens below (1 - top_p) / V of the mass hold less than 1 - top_p of it together, so the
    nucleus is reached before any of them.
    """
    host = probabilities.numpy()
    mass = host.sum(-1, keepdims=True, dtype=np.float64)
    # halved, as the running sums are rounded
    least = (1 - top_p.double().numpy())[:, None] * mass / (2 * host.shape[1])
    rows, ids = np.nonzero(host >= least)
    starts = np.searchsorted(rows, np.arange(len(host) + 1))
    padded = np.zeros((len(host), max(1, np.diff(starts).max(initial=0))), np.float32)
    padded[rows, np.arange(len(rows)) - starts[rows]] = host[rows, ids]
    return _sorted_down(padded)


def _sorted_whole(probabilities: Tensor, ks: Tensor, top_p: Tensor) -> Tensor:
    return _sorted_down(probabilities.numpy())


def _sorted_down(values: NDArray[np.float32]) -> Tensor:
    """Numpy sorts with SIMD, many times faster than torch on a CPU."""
    return torch.from_numpy(np.sort(values, axis=-1)).flip(-1)


def _drop_late_equals(kept: Tensor, values: Tensor, least: Tensor, count: Tensor | int) -> None:
    """Leave `count` of each row's kept values >= `least`: of equals the lower ids, in place."""
    surplus = kept.sum(-1, keepdim=True) - count
    if values.device.type == "cpu" and not surplus.any():
        return
    equal = values == least
    room = equal.sum(-1, keepdim=True) - surplus
    kept &= ~(equal & (equal.cumsum(-1) > room))
