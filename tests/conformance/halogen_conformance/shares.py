"""Who runs which case next: a share for each worker, and stealing for those who are done early."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

USUAL_S = {"3": 10.0, "4": 100.0}
"""Seconds by level that a case usually takes where an op's takes one."""


class Shares:
    """Cases in `workers` shares of about equal time.

    Neighbours in a list are alike and often need the same kernels, so a share is a run of
    neighbours; whoever has none left takes the last of the longest share (work stealing, Blumofe
    and Leiserson, 1999).
    """

    def __init__(self, ids: Sequence[str], workers: int) -> None:
        self._shares: list[deque[str]] = [deque() for _ in range(workers)]
        whole, before = _seconds(ids), 0.0
        # what takes longest must not be begun last; with one worker the order stays
        order = sorted(ids, key=usual_s, reverse=True) if workers > 1 else ids
        for case_id in order:
            middle = before + usual_s(case_id) / 2
            self._shares[int(middle / whole * workers)].append(case_id)
            before += usual_s(case_id)

    def take(self, worker: int) -> str | None:
        """The next case of `worker`; None: nothing is left for anybody."""
        if self._shares[worker]:
            return self._shares[worker].popleft()
        longest = max(self._shares, key=_seconds)
        return longest.pop() if longest else None

    def drop(self, level: str) -> Iterator[str]:
        """Take out all that is left of a level."""
        for share in self._shares:
            for case_id in [i for i in share if i[1] == level]:
                share.remove(case_id)
                yield case_id

    def __len__(self) -> int:
        return sum(map(len, self._shares))


def usual_s(case_id: str) -> float:
    """How long a case of this level usually takes, beside others."""
    return USUAL_S.get(case_id[1], 1.0)


def _seconds(ids: Sequence[str]) -> float:
    return sum(map(usual_s, ids))
