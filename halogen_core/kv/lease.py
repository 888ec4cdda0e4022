"""A sequence's hold on KV blocks, and what a prefix look-up found for it."""

from __future__ import annotations

import attrs

from halogen_core.kv.node import Node


@attrs.define(eq=False)
class Lease:
    """Blocks of one sequence: the first `len(nodes)` are published in the tree, the rest private.

    `blocks` is the sequence's block table. After blocks left the attention window, the first
    `num_released` entries repeat a block that is still held (they are never read).
    """

    owner: int
    root: Node
    use_cache: bool = True
    priority: int = 0
    session: str = ""
    blocks: list[int] = attrs.field(factory=list, init=False)
    nodes: list[Node] = attrs.field(factory=list, init=False)
    num_released: int = attrs.field(default=0, init=False)

    @property
    def tip(self) -> Node:
        """The node that the next block is published under."""
        return self.nodes[-1] if self.nodes else self.root


@attrs.frozen(eq=False)
class Match:
    """The longest cached prefix of a sequence."""

    num_tokens: int
    """Tokens that need not be computed."""
    nodes: tuple[Node, ...] = ()
    """Whole blocks, in order."""
    tail: Node | None = None
    """A block whose first tokens match; it is copied before it is extended."""
    num_idle: int = 0
    """Of `nodes` and `tail`, those that count as available until they are adopted."""
    num_absent: int = 0
    """Of `nodes`, those that need a device block (they are in a lower tier)."""
    first: int = 0
    """Of `nodes`, the first that is still inside the attention window."""
    state: object = None
    """Recurrent state at the end of `nodes`, where the model needs one."""

    def whole_blocks(self, block_size: int) -> Match:
        """The same without the tail, whose copy takes a block more for the moment."""
        if self.tail is None:
            return self
        return attrs.evolve(
            self,
            num_tokens=len(self.nodes) * block_size,
            tail=None,
            num_idle=self.num_idle - self.tail.is_idle,
        )
