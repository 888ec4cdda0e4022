"""Which cached block goes first.

Only leaves are candidates: a parent without its children is still a prefix, children without
their parent are out of reach. So there are about as many candidates as cached conversations.
"""

from __future__ import annotations

import abc
import heapq
from typing import Protocol

import attrs

from halogen_core.kv.node import Node

Score = tuple[float, ...]


class EvictionPolicy(Protocol):
    """Keeps the candidates and picks the victim. Ticks are steps of the engine."""

    def add(self, node: Node, tick: int) -> None:
        """`node` may go from now on; it was just let go if `node.last_used == tick`."""
        ...

    def discard(self, node: Node, tick: int) -> None:
        """`node` must stay; if it was a candidate, somebody wants it again."""
        ...

    def pop(self, tick: int) -> Node | None:
        """The victim; None if there is no candidate."""
        ...

    def pins(self, priority: int) -> bool:
        """Whether blocks of sequences of this priority are kept as long as the quota allows."""
        ...

    def clear(self) -> None:
        """No candidates any more."""
        ...


class ByScore(abc.ABC):
    """Candidates in order of a score taken when they come; O(log n), removal is lazy."""

    def __init__(self) -> None:
        self._heap: list[tuple[Score, int, int, Node]] = []
        self._serial = 0
        self._live = 0

    @abc.abstractmethod
    def score(self, node: Node) -> Score:
        """The lower, the sooner it goes."""

    def __len__(self) -> int:
        return self._live

    def pins(self, priority: int) -> bool:
        return False

    def add(self, node: Node, tick: int) -> None:
        if node.candidate:
            return
        node.candidate = True
        node.stamp += 1
        self._serial += 1
        self._live += 1
        heapq.heappush(self._heap, (self.score(node), self._serial, node.stamp, node))
        if len(self._heap) > 2 * self._live + 64:
            self._heap = [e for e in self._heap if e[3].candidate and e[2] == e[3].stamp]
            heapq.heapify(self._heap)

    def discard(self, node: Node, tick: int) -> None:
        if node.candidate:
            node.candidate = False
            self._live -= 1

    def peek(self) -> Node | None:
        """The next victim, left in place."""
        while self._heap:
            _, _, stamp, node = self._heap[0]
            if node.candidate and stamp == node.stamp:
                return node
            heapq.heappop(self._heap)
        return None

    def pop(self, tick: int) -> Node | None:
        node = self.peek()
        if node is not None:
            heapq.heappop(self._heap)
            self.discard(node, tick)
        return node

    def clear(self) -> None:
        self._heap.clear()
        self._live = 0


class LRU(ByScore):
    """Least recently used; what preempted sequences will come back for goes last."""

    def score(self, node: Node) -> Score:
        return (node.promised > 0, node.last_used)


@attrs.define(eq=False)
class SessionPriority(ByScore):
    """High-priority sessions are pinned within the quota, then go last; LRU among equals (A18)."""

    pin_from: int = 1
    """Sequences of this priority or higher are pinned."""

    def __attrs_pre_init__(self) -> None:
        super().__init__()

    def score(self, node: Node) -> Score:
        return (node.promised > 0, node.priority, node.last_used)

    def pins(self, priority: int) -> bool:
        return priority >= self.pin_from
