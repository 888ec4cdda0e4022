"""The pool's books, audited: every block has one place, every reference an owner."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.lease import Lease
from halogen_core.kv.node import NOWHERE, Node

log = logging.getLogger(__name__)


def nodes_of(pool: BlockPool) -> Iterator[Node]:
    """Every node of every prefix, roots left out, parents first."""
    stack = list(pool.tree.roots.values())
    while stack:
        node = stack.pop()
        stack += node.children.values()
        if not node.is_root:
            yield node


def breach(pool: BlockPool) -> str | None:
    """What is wrong with the books, recounted from scratch; None: nothing. Linear in blocks."""
    leases, nodes = list(pool.leases), list(nodes_of(pool))
    return _places(pool, leases, nodes) or _references(pool, leases, nodes) or _counts(pool, nodes)


def mend(pool: BlockPool, found: str | None = None) -> str | None:
    """Report a breach, count it, and make the books true again from what leases really hold.

    Cached prefixes that nobody holds are forgotten; running sequences keep their blocks.
    `found` is what is known to be wrong; without it the books are audited first.
    """
    found = found or breach(pool)
    if found is None:
        return None
    pool.breaches += 1
    log.error("KV ledger: %s (%s); rebuilt from %d leases", found, pool.stats(), len(pool.leases))
    at = pool.residency
    held: dict[Node, int] = Counter(pool.copy_sources())
    private: set[int] = set()
    for lease in pool.leases:
        for node in lease.nodes[lease.num_released :]:
            held[node] += 1
        private.update(lease.blocks[max(len(lease.nodes), lease.num_released) :])
    for node in list(nodes_of(pool)):
        if node.tier is not None:
            node.tier.give_back(node)
        node.refs, node.pinned, node.candidate = held.get(node, 0), 0, False
        node.resident_children = 0
        if not node.refs:
            node.block = NOWHERE
    _prune(pool)
    used = private | {node.block for node in held}
    at.free[:] = [b for b in range(pool.num_blocks - 1, -1, -1) if b not in used]
    at.num_idle = at.num_pinned = at.num_pin_marks = 0
    at.pins.clear()
    at.policy.clear()
    return found


def _prune(pool: BlockPool) -> None:
    """Only paths to blocks that have a place stay."""
    kept = list(nodes_of(pool))
    for node in sorted(kept, key=lambda n: -n.depth):
        parent = node.parent
        assert parent is not None
        parent.resident_children += node.block != NOWHERE
        if not node.is_somewhere and not node.children:
            del parent.children[node.tokens]
            if node.state is not None:
                pool.residency.drop_state(node.state)
    for root in list(pool.tree.roots.values()):
        root.resident_children = sum(c.block != NOWHERE for c in root.children.values())
        pool.tree.prune_root(root)


def _places(pool: BlockPool, leases: list[Lease], nodes: list[Node]) -> str | None:
    places = Counter(pool.residency.free)
    places.update(node.block for node in nodes if node.block != NOWHERE)
    for lease in leases:
        places.update(lease.blocks[max(len(lease.nodes), lease.num_released) :])
    wrong = {b: places[b] for b in range(pool.num_blocks) if places[b] != 1}
    if wrong or len(places) != pool.num_blocks:
        return f"blocks with other than one place: {dict(list(wrong.items())[:8])}"
    return None


def _references(pool: BlockPool, leases: list[Lease], nodes: list[Node]) -> str | None:
    owned = Counter(pool.copy_sources())
    for lease in leases:
        kept = slice(lease.num_released, None)
        owned.update(lease.nodes[kept])
        pairs = zip(lease.nodes[kept], lease.blocks[kept], strict=False)
        if any(node.block != block for node, block in pairs):
            return f"block table of {lease.owner} differs from its published blocks"
    for node in nodes:
        if node.refs != owned[node]:
            return f"block {node.block} counts {node.refs} references and has {owned[node]}"
        if node.refs and node.block == NOWHERE:
            return f"a block at depth {node.depth} is held and has no place"
        if node.resident_children != sum(c.block != NOWHERE for c in node.children.values()):
            return f"block {node.block} counts its children wrongly"
    return None


def _counts(pool: BlockPool, nodes: list[Node]) -> str | None:
    idle = sum(n.block != NOWHERE and not n.refs and not n.pinned for n in nodes)
    pinned = sum(n.block != NOWHERE and not n.refs and n.pinned > 0 for n in nodes)
    stats = pool.stats()
    if (idle, pinned) != (stats.cached, stats.pinned):
        return f"{idle} cached and {pinned} pinned blocks, counted as {stats}"
    if stats.free + stats.active + stats.cached + stats.pinned != stats.total:
        return f"states do not add up: {stats}"
    return None
