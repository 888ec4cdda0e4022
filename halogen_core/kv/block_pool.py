"""The KV block manager: who holds which block, what is cached, what goes first.

Ids only, no tensors and no device. At every step free + active + cached + pinned == total.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from halogen_core.errors import ConfigError
from halogen_core.kv.eviction import LRU, EvictionPolicy
from halogen_core.kv.lease import Lease, Match
from halogen_core.kv.node import NOWHERE, Node
from halogen_core.kv.residency import LedgerBreach, Residency
from halogen_core.kv.tiers import Tiers
from halogen_core.kv.tree import PrefixTree, ReuseRules, pack_tokens


@attrs.frozen
class PoolStats:
    """Blocks by state."""

    total: int
    free: int
    active: int
    cached: int
    pinned: int


class BlockPool:
    """Ref-counted blocks with prefix reuse, tiers below, and eviction by policy."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        eviction: EvictionPolicy | None = None,
        eviction_name: str = "lru",
        prefix_cache: bool = True,
        pin_quota: float = 0.5,
        rules: ReuseRules | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        """`pin_quota` is a share of the pool, `eviction_name` the policy's name in metrics."""
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"a KV pool of {num_blocks} blocks of {block_size} tokens holds nothing",
                code="HRT-3301",
                fix="give the KV pool more memory",
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.tree = PrefixTree(block_size, rules or ReuseRules())
        self.policy = LRU() if eviction is None else eviction
        self.eviction_name = eviction_name
        free = list(range(num_blocks - 1, -1, -1))
        quota = int(pin_quota * num_blocks)
        self.residency = Residency(self.tree, self.policy, free, quota, tiers)
        self.leases: dict[Lease, None] = {}
        self.breaches = 0
        self.most_active = 0
        """Most blocks that were held at once."""
        self._copies: dict[int, Node] = {}
        self._num_copies = 0
        self._promises: dict[int, list[Node]] = {}

    @property
    def num_available(self) -> int:
        """Blocks that could be had now: free, or cached and not pinned."""
        return self.residency.num_available

    def stats(self) -> PoolStats:
        """Blocks by state now."""
        at = self.residency
        free, cached, pinned = len(at.free), at.num_idle, at.num_pinned
        return PoolStats(
            self.num_blocks, free, self.num_blocks - free - cached - pinned, cached, pinned
        )

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
        lease = Lease(owner, root, use_cache and self.prefix_cache, priority, session)
        self.leases[lease] = None
        return lease

    def match(self, lease: Lease, tokens: Sequence[int]) -> Match:
        """The longest cached prefix of `tokens`; changes nothing."""
        if not lease.use_cache:
            return Match(0)
        return self.tree.match(lease.root, tokens)

    def adopt(self, lease: Lease, match: Match) -> bool:
        """Give an empty lease the blocks of `match`; False (and no change) if there is no room."""
        wanted = match.num_idle + match.num_absent + (match.tail is not None)
        if wanted > self.num_available:
            return False
        try:
            self._adopt(lease, match)
        except LedgerBreach as exc:  # what was found may not be there any more
            self._mend(str(exc))
            return False
        self.forget(lease.owner)
        return True

    def _adopt(self, lease: Lease, match: Match) -> None:
        held = match.nodes[match.first :]
        absent = [node for node in held if node.block == NOWHERE]
        for node in (*held, *((match.tail,) if match.tail else ())):
            if node.block != NOWHERE:
                self.residency.acquire(node, lease.priority)
        if absent:
            self.residency.restore(absent)
        lease.nodes += match.nodes
        lease.num_released = match.first
        lease.blocks += [held[0].block] * match.first if held else []
        lease.blocks += [node.block for node in held]
        if match.tail is not None:
            lease.blocks += self.residency.take(1)
            self._copies[lease.blocks[-1]] = match.tail
            self._num_copies += 1

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Room for `num_tokens` in all; False (and no change) if there is none."""
        missing = -(-num_tokens // self.block_size) - len(lease.blocks)
        if missing == 1 and self.residency.free:  # by far the most frequent
            lease.blocks.append(self.residency.free.pop())
        elif missing > 0:
            if missing > self.num_available:
                return False
            try:
                lease.blocks += self.residency.take(missing)
            except LedgerBreach as exc:
                self._mend(str(exc))  # nothing is cached then, so this happens once
                return self.grow(lease, num_tokens)
        return True

    def publish(self, lease: Lease, tokens: Sequence[int], num_computed: int) -> None:
        """Make blocks that are now full findable; a twin's block is taken instead of ours."""
        size = self.block_size
        if lease.use_cache:
            for i in range(len(lease.nodes), num_computed // size):
                self._publish(lease, i, pack_tokens(tokens[i * size : (i + 1) * size]))
        if self.tree.window is not None:
            self._shrink(lease, num_computed)

    def release(
        self, lease: Lease, tokens: Sequence[int] = (), num_computed: int = 0, *, back: bool = False
    ) -> None:
        """Give all blocks back; with `tokens`, what was computed stays findable, tail included.

        `back`: the sequence was preempted and will come for them.
        """
        if tokens and lease.use_cache and num_computed:
            self.publish(lease, tokens, num_computed)
            self._publish_tail(lease, tokens, num_computed)
        if back:
            self._promises[lease.owner] = list(lease.nodes)
            for node in lease.nodes:
                node.promised += 1
        if lease.session and self.policy.pins(lease.priority) and not lease.num_released:
            self.residency.pin(lease.session, lease.nodes)
        self._surrender(lease)
        del self.leases[lease]
        lease.root.refs -= 1
        self.tree.prune_root(lease.root)

    def forget(self, owner: int) -> None:
        """A preempted sequence is back, or will not come."""
        for node in self._promises.pop(owner, ()):
            node.promised -= 1

    def checkpoint(self, lease: Lease, state: Any) -> None:
        """Keep recurrent `state` with the last published block (hybrid models)."""
        if lease.nodes and lease.tip.state is None:
            lease.tip.state = state

    def insert(self, parent: Node, tokens: bytes) -> Node | None:
        """The cached block `tokens` under `parent`; a new one (uses 0) takes a free block.

        None if none is free: nothing is evicted for it.
        """
        node = parent.children.get(tokens)
        if node is not None and node.is_somewhere:
            return node
        if not self.residency.free:
            return None
        if node is None:
            node = parent.children[tokens] = Node(tokens, parent, parent.depth + 1)
        self.residency.place(node, self.residency.take(1)[0], 0)
        node.uses = 0
        self.residency.drop(node)
        if self.tree.window is None:
            self.policy.discard(parent, self.residency.tick)
        return node

    # -- one step

    def begin_step(self) -> None:
        at = self.residency
        at.tick += 1
        active = self.num_blocks - len(at.free) - at.num_idle - at.num_pinned
        self.most_active = max(self.most_active, active)

    def pending_copies(self) -> tuple[tuple[int, int], ...]:
        """Block copies (source, destination) to run before the step's writes.

        Given again until `end_step` says that they ran, so a repeated step loses none.
        """
        return tuple((source.block, target) for target, source in self._copies.items())

    def end_step(self) -> None:
        """The step and its copies have run."""
        while self._copies:
            self.residency.drop(self._copies.popitem()[1])

    def take_moves(self) -> tuple[int, int]:
        """Blocks moved to and from lower tiers since the last call."""
        tiers = self.residency.tiers
        if tiers is None:
            return 0, 0
        moved = tiers.num_out, tiers.num_in
        tiers.num_out = tiers.num_in = 0
        return moved

    def unpin_oldest(self) -> bool:
        """Make the longest unseen pinned session evictable; False if none is pinned."""
        return self.residency.unpin_oldest()

    # -- the books

    def copy_sources(self) -> Iterable[Node]:
        """Blocks held until a copy has run."""
        return self._copies.values()

    def audit_idle(self) -> None:
        """Nobody runs: no block may be active. A breach is counted and mended, never raised."""
        if self.stats().active > len(self._copies):
            self._mend()

    def counters(self) -> Mapping[str, float]:
        policy, evictions = self.eviction_name, self.residency.evictions
        return {
            **{f"kv_evictions{{policy={policy},reason={r}}}": n for r, n in evictions.items()},
            "kv_tail_copies": self._num_copies,
            "kv_invariant_breaches": self.breaches,
        }

    def gauges(self) -> Mapping[str, float]:
        tiers = self.residency.tiers
        below = {
            f"kv_tier_blocks{{tier={tier.name},state={state}}}": float(count)
            for tier in (tiers.stack if tiers else ())
            for state, count in (("used", len(tier.members)), ("free", len(tier.free)))
        }
        return {"kv_blocks_most_active": self.most_active, **below}

    # -- inside

    def _mend(self, found: str | None = None) -> None:
        from halogen_core.kv.ledger import mend  # late: it knows this module

        mend(self, found)

    def _surrender(self, lease: Lease) -> None:
        private = lease.blocks[max(len(lease.nodes), lease.num_released) :]
        self.residency.free += reversed(private)
        for block in private if self._copies else ():
            if source := self._copies.pop(block, None):
                self.residency.drop(source)
        for node in reversed(lease.nodes[lease.num_released :]):
            self.residency.drop(node)
        lease.nodes.clear()
        lease.blocks.clear()

    def _publish(self, lease: Lease, index: int, tokens: bytes) -> None:
        parent, block = lease.tip, lease.blocks[index]
        node = parent.children.get(tokens)
        if node is not None and node.block != NOWHERE:
            self.residency.free.append(block)
            lease.blocks[index] = node.block
            self.residency.acquire(node, lease.priority)
        else:
            if node is None:
                node = parent.children[tokens] = Node(tokens, parent, parent.depth + 1)
            self.residency.place(node, block, lease.priority)
        lease.nodes.append(node)

    def _publish_tail(self, lease: Lease, tokens: Sequence[int], num_computed: int) -> None:
        full = len(lease.nodes) * self.block_size
        if self.tree.min_tail <= num_computed - full:
            self._publish(lease, len(lease.nodes), pack_tokens(tokens[full:num_computed]))

    def _shrink(self, lease: Lease, num_computed: int) -> None:
        """Let go of blocks that no layer reads any more; their entries repeat one still held."""
        window = self.tree.window
        assert window is not None
        until = (num_computed - window + 1) // self.block_size
        until = min(until, (len(lease.nodes) if lease.use_cache else len(lease.blocks)) - 1)
        if until <= lease.num_released:
            return
        for i in range(lease.num_released, until):
            if lease.use_cache:
                self.residency.drop(lease.nodes[i])
            else:
                self.residency.free.append(lease.blocks[i])
        lease.num_released = until
        lease.blocks[:until] = [lease.blocks[until]] * until
