"""Which cached block goes first: a policy is a score, the lowest leaves.

Only leaves are candidates: a parent without its children is still a prefix, children without
their parent are out of reach.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

import attrs

from halogen_core.kv.node import Node


class EvictionPolicy(Protocol):
    """Scores a block when it becomes a candidate."""

    def score(self, node: Node) -> tuple[float, ...]:
        """The lower, the sooner it goes."""
        ...

    def evicted(self, score: tuple[float, ...]) -> None:
        """Told of each victim, for policies that age by inflation."""
        ...

    def pins(self, priority: int) -> bool:
        """Whether blocks of sequences of this priority are kept as long as the quota allows."""
        ...


@attrs.define
class LRU:
    """Least recently used."""

    def score(self, node: Node) -> tuple[float, ...]:
        return (node.promised > 0, node.last_used)

    def evicted(self, score: tuple[float, ...]) -> None:
        pass

    def pins(self, priority: int) -> bool:
        return False


@attrs.define
class SessionPriority:
    """High-priority sessions are pinned within the quota, then go last; LRU among equals (A18)."""

    pin_from: int = 1
    """Sequences of this priority or higher are pinned."""

    def score(self, node: Node) -> tuple[float, ...]:
        return (node.promised > 0, node.priority, node.last_used)

    def evicted(self, score: tuple[float, ...]) -> None:
        pass

    def pins(self, priority: int) -> bool:
        return priority >= self.pin_from


@attrs.define
class CheapestLoss:
    """What costs least to lose: time to recompute × chance of being wanted again.

    Uses stand for the chance, and ageing is by inflation: a score starts from that of the last
    victim, so what is not used again is overtaken. GreedyDual-Size-Frequency (Cherkasova, 1998).
    """

    recompute: Callable[[int], float] = attrs.field(default=lambda depth: 1.0 + depth / 512)
    """Cost of computing a block after `depth` others, in blocks at the beginning."""
    inflation: float = 0.0

    def score(self, node: Node) -> tuple[float, ...]:
        worth = (node.uses + node.promised) * self.recompute(node.depth)
        return (self.inflation + worth, node.last_used)

    def evicted(self, score: tuple[float, ...]) -> None:
        self.inflation = score[0]

    def pins(self, priority: int) -> bool:
        return False


@attrs.define(eq=False)
class Evictor:
    """The candidates in order of their scores: O(log n) in and out, removal is lazy."""

    policy: EvictionPolicy
    _heap: list[tuple[tuple[float, ...], int, int, Node]] = attrs.field(factory=list, init=False)
    _serial: int = attrs.field(default=0, init=False)
    _live: int = attrs.field(default=0, init=False)

    def __len__(self) -> int:
        return self._live

    def add(self, node: Node) -> None:
        """`node` may go from now on."""
        if node.candidate:
            return
        node.candidate = True
        node.stamp += 1
        self._serial += 1
        self._live += 1
        heapq.heappush(self._heap, (self.policy.score(node), self._serial, node.stamp, node))
        if len(self._heap) > 2 * self._live + 64:
            self._compact()

    def discard(self, node: Node) -> None:
        """`node` must stay."""
        if node.candidate:
            node.candidate = False
            self._live -= 1

    def pop(self) -> Node | None:
        """The victim; None if there is no candidate."""
        while self._heap:
            score, _, stamp, node = heapq.heappop(self._heap)
            if node.candidate and stamp == node.stamp:
                self.discard(node)
                self.policy.evicted(score)
                return node
        return None

    def clear(self) -> None:
        """No candidates any more."""
        self._heap.clear()
        self._live = 0

    def _compact(self) -> None:
        self._heap = [e for e in self._heap if e[3].candidate and e[2] == e[3].stamp]
        heapq.heapify(self._heap)
