"""A block's worth of cached tokens: one node of the prefix tree."""

from __future__ import annotations

from typing import Any

import attrs

NOWHERE = -1


@attrs.define(eq=False, init=False)
class Node:
    """KV of one block of tokens after a given prefix (the path from the root).

    A node is found by its parent and its exact tokens, so two prefixes can never be taken for
    each other: there is no hash that could collide.
    """

    tokens: bytes
    """Little-endian uint32, block_size of them; fewer in a partial tail. A root holds the salt."""
    parent: Node | None
    depth: int
    """Blocks before this one."""
    children: dict[bytes, Node]
    block: int
    """Device block."""
    slot: int
    """Slot in a lower tier."""
    tier: Any
    """The lower tier that `slot` is in."""
    refs: int
    """Sequences that hold it (of a root: leases that may publish under it)."""
    resident_children: int
    """Children with a device block."""
    last_used: int
    """Tick of the pool's clock."""
    uses: int
    """Times it was computed or adopted."""
    promised: int
    """Preempted sequences that will come back for it."""
    priority: int
    """Highest of those that used it."""
    pinned: int
    """Sessions that pin it."""
    candidate: bool
    """May be evicted now."""
    stamp: int
    """Counts candidacies, so that stale entries of the evictor's heap are known."""
    state: Any
    """Recurrent-state checkpoint at the end of this block (hybrid models)."""

    def __init__(self, tokens: bytes, parent: Node | None, depth: int) -> None:
        # by hand: one is made for every block of text, and this takes half of attrs' time
        self.tokens, self.parent, self.depth = tokens, parent, depth
        self.children = {}
        self.block = self.slot = NOWHERE
        self.tier = self.state = None
        self.refs = self.resident_children = self.last_used = 0
        self.uses = 1
        self.promised = self.priority = self.pinned = self.stamp = 0
        self.candidate = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_idle(self) -> bool:
        """On the device, held by nobody, free to go."""
        return self.block != NOWHERE and not self.refs and not self.pinned

    @property
    def is_somewhere(self) -> bool:
        """On the device or in a lower tier; else it only leads to its children."""
        return self.block != NOWHERE or self.tier is not None
