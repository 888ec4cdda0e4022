"""The waiting queue: O(log n) in and out, removal is lazy."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import attrs

from halogen_core.scheduler.sequence import Sequence


@attrs.define(eq=False)
class WaitingQueue:
    """Sequences by key; those taken out in the middle leave a hole that is skipped later."""

    _heap: list[tuple[tuple[float, int], int, Sequence]] = attrs.field(factory=list, init=False)
    num_tokens: int = attrs.field(default=0, init=False)
    """Of all members' known text."""
    _serial: int = attrs.field(default=0, init=False)
    _members: dict[int, Sequence] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._members)

    def push(self, seq: Sequence) -> None:
        self._members[seq.seq_id] = seq
        self.num_tokens += seq.num_tokens
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
        self.num_tokens -= seq.num_tokens
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [e for e in self._heap if self._members.get(e[2].seq_id) is e[2]]
            heapq.heapify(self._heap)

    def by_age(self) -> Iterator[Sequence]:
        """Members, longest here first."""
        return iter(self._members.values())

    def oldest(self) -> Sequence | None:
        """The member that has been here longest."""
        return next(iter(self._members.values()), None)
