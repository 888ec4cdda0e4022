"""The pool's books, audited: every block has one place, every reference an owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.lease import Lease
from halogen_core.kv.node import NOWHERE, Node


def nodes_of(pool: BlockPool) -> Iterator[Node]:
    """Every node of every prefix, roots left out, parents first."""
    stack = list(pool.tree.roots.values())
    while stack:
        node = stack.pop()
        stack += node.children.values()
        if not node.is_root:
            yield node


def breach(pool: BlockPool, leases: Iterable[Lease]) -> str | None:
    """What is wrong with the books, recounted from scratch; None: nothing. Linear in blocks."""
    leases = list(leases)
    nodes = list(nodes_of(pool))
    return _places(pool, leases, nodes) or _references(pool, leases, nodes) or _counts(pool, nodes)


def _places(pool: BlockPool, leases: list[Lease], nodes: list[Node]) -> str | None:
    places = Counter(pool.free_blocks())
    places.update(node.block for node in nodes if node.block != NOWHERE)
    for lease in leases:
        places.update(lease.blocks[len(lease.nodes) :])
    wrong = {b: places[b] for b in range(pool.num_blocks) if places[b] != 1}
    if wrong or len(places) != pool.num_blocks:
        return f"blocks with other than one place: {dict(list(wrong.items())[:8])}"
    return None


def _references(pool: BlockPool, leases: list[Lease], nodes: list[Node]) -> str | None:
    owned = Counter(pool.copy_sources())
    for lease in leases:
        owned.update(lease.nodes)
        if any(n.block != b for n, b in zip(lease.nodes, lease.blocks, strict=False)):
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
    pinned = sum(n.pinned for n in nodes)
    stats = pool.stats()
    if (idle, pinned) != (stats.cached, stats.pinned):
        return f"{idle} cached and {pinned} pinned blocks, counted as {stats}"
    if stats.free + stats.active + stats.cached + stats.pinned != stats.total:
        return f"states do not add up: {stats}"
    return None
