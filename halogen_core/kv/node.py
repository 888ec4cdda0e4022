"""A block's worth of cached tokens: one node of the prefix tree."""

from __future__ import annotations

from typing import Any

import attrs

NOWHERE = -1


@attrs.define(eq=False)
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
    children: dict[bytes, Node] = attrs.field(factory=dict, init=False)
    block: int = attrs.field(default=NOWHERE, init=False)
    """Device block."""
    slot: int = attrs.field(default=NOWHERE, init=False)
    """Slot in a lower tier."""
    tier: Any = attrs.field(default=None, init=False)
    """The lower tier that `slot` is in."""
    refs: int = attrs.field(default=0, init=False)
    """Sequences that hold it (of a root: leases that may publish under it)."""
    resident_children: int = attrs.field(default=0, init=False)
    """Children with a device block."""
    last_used: int = attrs.field(default=0, init=False)
    """Tick of the pool's clock."""
    uses: int = attrs.field(default=1, init=False)
    """Times it was computed or adopted."""
    promised: int = attrs.field(default=0, init=False)
    """Preempted sequences that will come back for it."""
    priority: int = attrs.field(default=0, init=False)
    """Highest of those that used it."""
    pinned: int = attrs.field(default=0, init=False)
    """Sessions that pin it."""
    candidate: bool = attrs.field(default=False, init=False)
    """May be evicted now."""
    stamp: int = attrs.field(default=0, init=False)
    """Counts candidacies, so that stale entries of the evictor's heap are known."""
    state: Any = attrs.field(default=None, init=False)
    """Recurrent-state checkpoint at the end of this block (hybrid models)."""

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
