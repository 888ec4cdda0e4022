"""What is on the device: free blocks, held, cached and pinned ones, and who has to go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from halogen_core.kv.eviction import EvictionPolicy
from halogen_core.kv.node import NOWHERE, Node
from halogen_core.kv.tiers import Tiers
from halogen_core.kv.tree import PrefixTree


class LedgerBreach(Exception):
    """The books are wrong; never leaves the block manager, which mends them."""


def ignore_state(state: Any) -> None:
    """No recurrent state is kept."""


@attrs.define(eq=False)
class Residency:
    """Places of all blocks. A node is held (refs), pinned, or idle: cached and free to go."""

    tree: PrefixTree
    policy: EvictionPolicy
    free: list[int]
    pin_quota: int
    tiers: Tiers | None = None
    drop_state: Callable[[Any], None] = ignore_state
    tick: int = attrs.field(default=0, init=False)
    num_idle: int = attrs.field(default=0, init=False)
    num_pinned: int = attrs.field(default=0, init=False)
    """Pinned and not held."""
    num_pin_marks: int = attrs.field(default=0, init=False)
    """Nodes that some session pins, held or not; at most `pin_quota`."""
    evictions: dict[str, int] = attrs.field(
        factory=lambda: {"forgotten": 0, "moved": 0, "tier_full": 0}, init=False
    )
    """Blocks that left the device for nowhere or a lower tier, or left the lowest tier."""
    pins: OrderedDict[str, dict[Node, None]] = attrs.field(factory=OrderedDict, init=False)

    @property
    def num_available(self) -> int:
        return len(self.free) + self.num_idle

    def take(self, count: int) -> list[int]:
        """`count` blocks, which must be available; cached ones are evicted if need be."""
        if len(self.free) < count:
            self._evict(count - len(self.free))
        if count == 1:
            return [self.free.pop()]
        taken = self.free[-count:][::-1] if count else []
        del self.free[len(self.free) - count :]
        return taken

    # -- references

    def acquire(self, node: Node, priority: int) -> None:
        """One more holds `node`, which is on the device."""
        if not node.refs:
            if node.pinned:
                self.num_pinned -= 1
            else:
                self.num_idle -= 1
                self.policy.discard(node, self.tick)
        node.refs += 1
        node.uses += 1
        node.priority = max(node.priority, priority)

    def drop(self, node: Node) -> None:
        """One fewer holds `node`."""
        node.refs -= 1
        if not node.refs:
            node.last_used = self.tick
            self._rest(node)

    def place(self, node: Node, block: int, priority: int) -> None:
        """`node`'s content is in `block`, held by whoever computed it."""
        if node.tier is not None:
            node.tier.give_back(node)
        node.block, node.refs, node.priority = block, 1, max(node.priority, priority)
        assert node.parent is not None
        node.parent.resident_children += 1

    def restore(self, nodes: Sequence[Node]) -> None:
        """Bring nodes from lower tiers back; the blocks for them must be available."""
        assert self.tiers is not None
        data = self.tiers.fetch(nodes)  # before `take`, which may push them out of their tiers
        for node in nodes:
            node.refs = 1
        blocks = self.take(len(nodes))
        self.tiers.mover.import_blocks(blocks, data)
        for node, block in zip(nodes, blocks, strict=True):
            node.block = block
            assert node.parent is not None
            node.parent.resident_children += 1

    # -- pins

    def pin(self, session: str, nodes: Sequence[Node]) -> None:
        """Keep `nodes` (root first) for `session` as far as the quota goes.

        Sessions that were not seen for longest lose their pins to those that were.
        """
        held = self.pins.setdefault(session, {})
        self.pins.move_to_end(session)
        for node in nodes:
            if node in held:
                continue
            if not node.pinned:
                while self.num_pin_marks >= self.pin_quota and next(iter(self.pins)) != session:
                    self.unpin_oldest()
                if self.num_pin_marks >= self.pin_quota:
                    break
                self.num_pin_marks += 1
                if not node.refs:
                    self.num_idle -= 1
                    self.num_pinned += 1
                    self.policy.discard(node, self.tick)
            node.pinned += 1
            held[node] = None

    def unpin_oldest(self) -> bool:
        """The longest unseen session's blocks may go; False if nothing is pinned."""
        if not self.pins:
            return False
        for node in reversed(self.pins.popitem(last=False)[1]):
            node.pinned -= 1
            if not node.pinned:
                self.num_pin_marks -= 1
                if not node.refs:
                    self.num_pinned -= 1
                    self._rest(node)
        return True

    # -- eviction

    def offer(self, node: Node) -> None:
        """Make `node` a candidate if it is one: a leaf, or anything under an attention window."""
        if node.is_idle and (self.tree.window is not None or not node.resident_children):
            self.policy.add(node, self.tick)

    def _rest(self, node: Node) -> None:
        if node.pinned:
            self.num_pinned += 1
        else:
            self.num_idle += 1
            self.offer(node)

    def _evict(self, count: int) -> None:
        nodes, blocks = [], []
        for _ in range(count):
            node = self.policy.pop(self.tick)
            if node is None:
                raise LedgerBreach(f"{self.num_idle} cached blocks and no candidate for eviction")
            nodes.append(node)
            blocks.append(node.block)
            self._unplace(node)
        moved, lost = 0, nodes
        if self.tiers is not None:
            before = self.tiers.num_out
            lost = self.tiers.receive(nodes, blocks)
            moved = self.tiers.num_out - before
        for node in lost:
            self._forget(node)
        self.free += reversed(blocks)
        self.evictions["moved"] += moved
        self.evictions["forgotten"] += count - moved
        self.evictions["tier_full"] += len(lost) - (count - moved)

    def _unplace(self, node: Node) -> None:
        node.block = NOWHERE
        self.num_idle -= 1
        parent = node.parent
        assert parent is not None
        parent.resident_children -= 1
        self.offer(parent)

    def _forget(self, node: Node) -> None:
        """A node without a place leaves the tree, and so do ancestors that only led to it."""
        if node.state is not None:
            self.drop_state(node.state)
            node.state = None
        while not (node.is_root or node.refs or node.is_somewhere or node.children):
            parent = node.parent
            assert parent is not None
            if parent.children.pop(node.tokens, None) is None:
                return  # an ancestor of it, evicted along with it, was forgotten before
            node = parent
        if node.is_root:
            self.tree.prune_root(node)
