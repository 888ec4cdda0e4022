"""The prefix tree: which blocks of which prefixes are cached, and the search in it.

A hash map per node from exact tokens to child replaces chained digests: a look-up compares the
tokens themselves, costs about a third of hashing them, and cannot collide (ADR 0020).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import attrs

from halogen_core.kv.lease import Match
from halogen_core.kv.node import NOWHERE, Node

TOKEN_BYTES = 4
MAX_TAILS = 16
"""Children looked at for a partial match."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian uint32 (on the little-endian machines we run on: native)."""
    return array("I", tokens).tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """Length of the common prefix in tokens."""
    limit = min(len(a), len(b)) // TOKEN_BYTES
    low = 0
    while low < limit:  # bisection by slices: compares run in C
        middle = (low + limit + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            limit = middle - 1
    return low


@attrs.frozen(kw_only=True)
class ReuseRules:
    """When a cached block may serve."""

    min_tail: int | None = None
    """Fewest tokens for which a partial match is worth copying a block; None: a quarter of it."""
    window: int | None = None
    """Attention window in tokens, if every layer has one: older blocks need not be resident."""
    needs_state: bool = False
    """Recurrent layers: a prefix is usable only up to a state checkpoint."""


@attrs.define(eq=False)
class PrefixTree:
    """All cached prefixes, by salt."""

    block_size: int
    rules: ReuseRules = attrs.field(factory=ReuseRules)
    min_tail: int = attrs.field(init=False)
    window: int | None = attrs.field(init=False)
    roots: dict[bytes, Node] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.min_tail = self.rules.min_tail or max(1, self.block_size // 4)
        self.window = self.rules.window

    def root(self, salt: bytes) -> Node:
        """The tree of `salt`, made on first use."""
        found = self.roots.get(salt)
        if found is None:
            found = self.roots[salt] = Node(salt, None, -1)
        return found

    def prune_root(self, root: Node) -> None:
        """Forget a salt that nobody uses any more."""
        if not root.refs and not root.children and self.roots.get(root.tokens) is root:
            del self.roots[root.tokens]

    def match(self, root: Node, tokens: Sequence[int]) -> Match:
        """The longest usable prefix of `tokens`, at least one token short of the whole.

        Linear in blocks.
        """
        last = len(tokens) - 1
        if last < 1 or not root.children:
            return Match(0)
        data = pack_tokens(tokens if len(tokens) < 4096 else array("I", tokens))
        path = self._walk(root, data, last // self.block_size)
        path = path[: self._usable(path)]
        first = self._first_needed(len(path))
        tail, extra = (None, 0) if self.rules.needs_state else self._tail(path, root, data, last)
        held = (*path[first:], *((tail,) if tail else ()))
        return Match(
            len(path) * self.block_size + extra,
            tuple(path),
            tail,
            sum(n.is_idle for n in held),
            sum(n.block == NOWHERE for n in held),
            first,
            path[-1].state if path and self.rules.needs_state else None,
        )

    def _walk(self, node: Node, data: bytes, max_blocks: int) -> list[Node]:
        path: list[Node] = []
        step = self.block_size * TOKEN_BYTES
        ghosts = self.window is not None
        for at in range(0, max_blocks * step, step):
            child = node.children.get(data[at : at + step])
            if child is None or not (ghosts or child.is_somewhere):
                break
            path.append(child)
            node = child
        return path

    def _usable(self, path: list[Node]) -> int:
        """How many blocks of `path` a sequence may start from."""
        if self.window is None and not self.rules.needs_state:
            return len(path)  # `_walk` stopped at the first absent one
        for length in range(len(path), 0, -1):
            if self.rules.needs_state and path[length - 1].state is None:
                continue
            if all(n.is_somewhere for n in path[self._first_needed(length) : length]):
                return length
        return 0

    def _first_needed(self, num_blocks: int) -> int:
        """Index of the first block that a token after `num_blocks` blocks still reads."""
        if self.window is None or not num_blocks:
            return 0
        oldest = num_blocks * self.block_size - self.window + 1
        return min(num_blocks - 1, max(0, oldest // self.block_size))

    def _tail(
        self, path: list[Node], root: Node, data: bytes, last: int
    ) -> tuple[Node | None, int]:
        """The child of the path's end that shares most tokens with what follows."""
        node = path[-1] if path else root
        start = len(path) * self.block_size
        rest = data[start * TOKEN_BYTES : min(start + self.block_size, last) * TOKEN_BYTES]
        best, most = None, self.min_tail - 1
        for i, child in enumerate(node.children.values()):
            if i == MAX_TAILS:
                break
            if child.block != NOWHERE and (n := common_tokens(child.tokens, rest)) > most:
                best, most = child, n
        return best, (most if best else 0)
