"""The waiting queue: O(log n) in and out, removal is lazy."""

from __future__ import annotations

import heapq

import attrs

from halogen_core.scheduler.sequence import Sequence


@attrs.define(eq=False)
class WaitingQueue:
    """Sequences by key; those taken out in the middle leave a hole that is skipped later."""

    _heap: list[tuple[tuple[float, int], int, Sequence]] = attrs.field(factory=list, init=False)
    _serial: int = attrs.field(default=0, init=False)
    _members: dict[int, Sequence] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._members)

    def push(self, seq: Sequence) -> None:
        self._members[seq.seq_id] = seq
        self._serial += 1
        heapq.heappush(self._heap, (seq.key, self._serial, seq))

    def head(self) -> Sequence | None:
        """The first, left in place."""
        while self._heap:
            seq = self._heap[0][2]
            if self._members.get(seq.seq_id) is seq:
                return seq
            heapq.heappop(self._heap)
        return None

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it stands."""
        del self._members[seq.seq_id]
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [e for e in self._heap if self._members.get(e[2].seq_id) is e[2]]
            heapq.heapify(self._heap)

    def oldest_arrival(self) -> float:
        """Of the longest waiting member; the queue must not be empty."""
        return next(iter(self._members.values())).arrival

    def members(self) -> list[Sequence]:
        return list(self._members.values())
