"""Eviction by cheapest loss: what costs least to lose goes, cost × chance of being wanted again.

The system prompt tells what kind of work a branch belongs to: titles are asked once, subagents
answer within seconds and die, a user's own conversation comes back after minutes. So branches are
grouped by their first block, and each group's chance to come back after a given idle time is
learned from what came back. Hit density as in LHD (Beckmann, Chen, Cidon, NSDI 2018), with the
group in place of its age classes.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from halogen_core.kv.eviction import LRU
from halogen_core.kv.node import Node

BUCKETS = 24
"""Idle times by powers of two of ticks."""
FAMILIAR = 3
"""Uses of a first block that make it a kind of its own."""
MAX_KINDS = 64
MEMORY = 256
"""Releases after which what was learned counts half."""


@attrs.define(eq=False)
class Kind:
    """Branches with the same beginning, and what became of such branches."""

    order: LRU = attrs.field(factory=LRU)
    released: float = 0.0
    returns: list[float] = attrs.field(factory=lambda: [0.0] * BUCKETS)

    def density(self, idle: int, horizon: float) -> float:
        """Expected uses per tick of keeping a branch that has been idle for `idle` ticks.

        Branches that do not return are thought to stay for `horizon` ticks.
        """
        bucket = idle.bit_length()
        coming = sum(self.returns[bucket:])
        dead = max(0.0, self.released - sum(self.returns))
        wait = sum(
            count * max(1.0, 1.5 * 2.0 ** (bucket + i - 1) - idle)
            for i, count in enumerate(self.returns[bucket:])
            if count
        )
        return (coming + 0.5) / (wait + (dead + 0.5) * horizon)

    def release(self) -> None:
        self.released += 1
        if self.released > MEMORY:
            self.released /= 2
            self.returns = [count / 2 for count in self.returns]

    def come_back(self, idle: int) -> None:
        self.returns[min(idle.bit_length(), BUCKETS - 1)] += 1


def linear_cost(depth: int) -> float:
    """Time to compute a block after `depth` others, in first blocks: attention grows with it."""
    return 1.0 + depth / 4096


@attrs.define(eq=False)
class CheapestLoss:
    """Within a kind the longest idle goes first, among kinds the one with the cheapest loss."""

    recompute: Callable[[int], float] = linear_cost
    horizon: float = 64.0
    """Ticks that victims had been idle, on average."""
    kinds: dict[Node | None, Kind] = attrs.field(factory=dict, init=False)
    promised: LRU = attrs.field(factory=LRU, init=False)
    """Preempted sequences come back for these: they go last."""
    _places: dict[Node, Kind | None] = attrs.field(factory=dict, init=False)

    def add(self, node: Node, tick: int) -> None:
        if node.candidate:
            return
        if node.promised:
            self._places[node] = None
            self.promised.add(node, tick)
            return
        kind = self._places[node] = self._kind(node)
        kind.order.add(node, tick)
        if node.last_used == tick:
            kind.release()

    def discard(self, node: Node, tick: int) -> None:
        if not node.candidate:
            return
        kind = self._places.pop(node)
        if kind is None:
            self.promised.discard(node, tick)
            return
        kind.order.discard(node, tick)
        kind.come_back(tick - node.last_used)

    def pop(self, tick: int) -> Node | None:
        best, least = None, float("inf")
        for kind in self.kinds.values():
            node = kind.order.peek()
            if node is None:
                continue
            density = kind.density(tick - node.last_used, self.horizon)
            loss = density * self.recompute(node.depth)
            if loss < least:
                best, least = kind, loss
        victim = (best.order if best else self.promised).pop(tick)
        if victim is not None:
            del self._places[victim]
            idle = max(1, tick - victim.last_used)
            self.horizon += (idle - self.horizon) / 256
        return victim

    def pins(self, priority: int) -> bool:
        return False

    def clear(self) -> None:
        self.kinds.clear()
        self.promised.clear()
        self._places.clear()

    def _kind(self, node: Node) -> Kind:
        """Of the branch's first block, once that has been used a few times."""
        first = node
        while first.parent is not None and first.depth > 0:
            first = first.parent
        known = self.kinds.get(first)
        if known is not None:
            return known
        if first.uses < FAMILIAR:
            return self.kinds.setdefault(None, Kind())
        if len(self.kinds) >= MAX_KINDS:
            self._retire()
        return self.kinds.setdefault(first if len(self.kinds) < MAX_KINDS else None, Kind())

    def _retire(self) -> None:
        """Forget kinds that have nothing cached any more."""
        self.kinds = {key: kind for key, kind in self.kinds.items() if len(kind.order)}
