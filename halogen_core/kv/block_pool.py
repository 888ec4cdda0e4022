"""The KV block manager: who holds which block, what is cached, what goes first.

Ids only, no tensors and no device. At every step free + active + cached + pinned == total.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from halogen_core.kv.eviction import LRU, EvictionPolicy, Evictor
from halogen_core.kv.lease import Lease, Match
from halogen_core.kv.node import NOWHERE, Node
from halogen_core.kv.tree import PrefixTree, pack_tokens

COUNTERS = ("evictions", "tail_copies")


@attrs.frozen
class PoolStats:
    """Blocks by state."""

    total: int
    free: int
    active: int
    cached: int
    pinned: int


class BlockPool:
    """Ref-counted blocks with prefix reuse and eviction by policy."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        eviction: EvictionPolicy | None = None,
        prefix_cache: bool = True,
        pin_quota: float = 0.5,
        min_tail: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pin_quota = int(pin_quota * num_blocks)
        self.tree = PrefixTree(block_size, min_tail or max(1, block_size // 4))
        self.evictor = Evictor(eviction or LRU())
        self.tick = 0
        self.counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle = 0
        self._pinned: dict[Node, None] = {}
        self._copies: dict[int, Node] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free, or cached and not pinned."""
        return len(self._free) + self._idle

    def stats(self) -> PoolStats:
        """Blocks by state now."""
        free, cached, pinned = len(self._free), self._idle, len(self._pinned)
        return PoolStats(
            self.num_blocks, free, self.num_blocks - free - cached - pinned, cached, pinned
        )

    def free_blocks(self) -> Sequence[int]:
        """Ids that hold nothing."""
        return self._free

    def copy_sources(self) -> Iterable[Node]:
        """Blocks held until a copy has run."""
        return self._copies.values()

    # -- a sequence's way

    def open(
        self,
        owner: int,
        salt: bytes = b"",
        *,
        use_cache: bool = True,
        priority: int = 0,
        session: str = "",
    ) -> Lease:
        """A lease without blocks."""
        root = self.tree.root(salt)
        root.refs += 1
        return Lease(owner, root, use_cache and self.prefix_cache, priority, session)

    def match(self, lease: Lease, tokens: Sequence[int]) -> Match:
        """The longest cached prefix of `tokens`; changes nothing."""
        if not lease.use_cache:
            return Match(0)
        return self.tree.match(lease.root, tokens)

    def adopt(self, lease: Lease, match: Match) -> bool:
        """Give an empty lease the blocks of `match`; False (and no change) if there is no room."""
        for node in match.nodes:
            self._acquire(node, lease.priority)
        lease.nodes += match.nodes
        lease.blocks += [node.block for node in match.nodes]
        if match.tail is None:
            return True
        self._acquire(match.tail, lease.priority)
        if not self._extend(lease, 1):
            self._drop(match.tail)
            self._surrender(lease)
            return False
        self._copies[lease.blocks[-1]] = match.tail
        self.counts["tail_copies"] += 1
        return True

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Room for `num_tokens` in all; False (and no change) if there is none."""
        missing = -(-num_tokens // self.block_size) - len(lease.blocks)
        return missing <= 0 or self._extend(lease, missing)

    def publish(self, lease: Lease, tokens: Sequence[int], num_computed: int) -> None:
        """Make blocks that are now full findable; a twin's block is taken instead of ours."""
        if not lease.use_cache:
            return
        size = self.block_size
        for i in range(len(lease.nodes), num_computed // size):
            self._publish(lease, i, pack_tokens(tokens[i * size : (i + 1) * size]))

    def release(
        self, lease: Lease, tokens: Sequence[int] = (), num_computed: int = 0, *, back: bool = False
    ) -> None:
        """Give all blocks back; with `tokens`, what was computed stays findable, tail included."""
        if tokens and lease.use_cache:
            self.publish(lease, tokens, num_computed)
            self._publish_tail(lease, tokens, num_computed)
        self._surrender(lease)
        lease.root.refs -= 1
        self.tree.prune_root(lease.root)

    def pending_copies(self) -> tuple[tuple[int, int], ...]:
        """Block copies (source, destination) to run before the step's writes.

        Given again until `end_step` says that they ran, so a repeated step loses none.
        """
        return tuple((source.block, target) for target, source in self._copies.items())

    def begin_step(self) -> None:
        self.tick += 1

    def end_step(self) -> None:
        """The step and its copies have run."""
        while self._copies:
            self._drop(self._copies.popitem()[1])

    def take_moves(self) -> tuple[int, int]:
        """Blocks moved to and from lower tiers since the last call."""
        return 0, 0

    def unpin_oldest(self) -> bool:
        return False

    def counters(self) -> Mapping[str, float]:
        return {f"kv_{name}": count for name, count in self.counts.items()}

    def gauges(self) -> Mapping[str, float]:
        stats = self.stats()
        return {"cache_usage": (stats.active + stats.pinned) / stats.total}

    # -- blocks

    def _extend(self, lease: Lease, count: int) -> bool:
        if count > self.num_available:
            return False
        while len(self._free) < count:
            self._evict()
        for _ in range(count):
            lease.blocks.append(self._free.pop())
        return True

    def _evict(self) -> None:
        node = self.evictor.pop()
        assert node is not None, "cached blocks without a candidate"
        self._idle -= 1
        self._free.append(node.block)
        self.counts["evictions"] += 1
        self._unplace(node)

    def _unplace(self, node: Node) -> None:
        """`node` loses its device block; without another home it leaves the tree."""
        node.block = NOWHERE
        parent = node.parent
        assert parent is not None
        parent.resident_children -= 1
        if not node.children:
            del parent.children[node.tokens]
        self._offer(parent)
        if parent.is_root:
            self.tree.prune_root(parent)

    def _offer(self, node: Node) -> None:
        """Make `node` a candidate if it is one."""
        if (
            node.block != NOWHERE
            and not node.refs
            and not node.pinned
            and not node.resident_children
        ):
            self.evictor.add(node)

    # -- references

    def _acquire(self, node: Node, priority: int) -> None:
        if not node.refs and not node.pinned:
            self._idle -= 1
            self.evictor.discard(node)
        node.refs += 1
        node.uses += 1
        node.priority = max(node.priority, priority)

    def _drop(self, node: Node) -> None:
        node.refs -= 1
        if not node.refs:
            node.last_used = self.tick
            if not node.pinned:
                self._idle += 1
                self._offer(node)

    def _surrender(self, lease: Lease) -> None:
        private = lease.blocks[len(lease.nodes) :]
        self._free += reversed(private)
        for block in private if self._copies else ():
            if source := self._copies.pop(block, None):
                self._drop(source)
        for node in reversed(lease.nodes):
            self._drop(node)
        lease.nodes.clear()
        lease.blocks.clear()

    def _publish(self, lease: Lease, index: int, tokens: bytes) -> None:
        parent, block = lease.tip, lease.blocks[index]
        node = parent.children.get(tokens)
        if node is not None and node.block != NOWHERE:
            self._free.append(block)
            lease.blocks[index] = node.block
            self._acquire(node, lease.priority)
        else:
            if node is None:
                node = parent.children[tokens] = Node(tokens, parent, parent.depth + 1)
            node.block, node.refs, node.priority = block, 1, lease.priority
            parent.resident_children += 1
        lease.nodes.append(node)

    def _publish_tail(self, lease: Lease, tokens: Sequence[int], num_computed: int) -> None:
        full = len(lease.nodes) * self.block_size
        if self.tree.min_tail <= num_computed - full:
            self._publish(lease, len(lease.nodes), pack_tokens(tokens[full:num_computed]))
