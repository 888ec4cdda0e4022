"""Memory below the device pool: blocks in canonical form in host memory or in a file.

All of it is taken at start; moving a block allocates nothing that lasts.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import numpy as np

from halogen_core.errors import OutOfMemory
from halogen_core.kv.node import NOWHERE, Node
from halogen_core.spi.arrays import Bytes


class KVMover(Protocol):
    """Carries blocks between device and host; the engine makes one from a backend."""

    @property
    def bytes_per_block(self) -> int:
        """Of a block in canonical form."""
        ...

    def export_blocks(self, blocks: Sequence[int]) -> Bytes:
        """uint8 [n, bytes_per_block]"""
        ...

    def import_blocks(self, blocks: Sequence[int], data: Bytes) -> None: ...


@attrs.define(eq=False)
class Tier:
    """Slots of one kind of memory; the longest unused leaves first."""

    name: str
    rows: Bytes
    """uint8 [slots, bytes_per_block]"""
    free: list[int] = attrs.field(init=False)
    members: OrderedDict[Node, None] = attrs.field(factory=OrderedDict, init=False)

    def __attrs_post_init__(self) -> None:
        self.free = list(range(len(self.rows) - 1, -1, -1))

    @classmethod
    def host(cls, num_bytes: int, bytes_per_block: int) -> Tier:
        """In this process's memory."""
        return cls("host", np.zeros((num_bytes // bytes_per_block, bytes_per_block), np.uint8))

    @classmethod
    def disk(cls, directory: Path, num_bytes: int, bytes_per_block: int) -> Tier:
        """In a nameless file, taken whole now so that a full disk is found at start."""
        shape = (num_bytes // bytes_per_block, bytes_per_block)
        with tempfile.TemporaryFile(dir=directory) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, shape[0] * shape[1]))
            except OSError as exc:
                raise OutOfMemory(
                    f"the disk tier of {num_bytes} bytes does not fit in `{directory}`:"
                    f" {exc.strerror}",
                    code="HRT-3304",
                    fix="free space there, choose another directory or a smaller tier",
                ) from exc
            return cls("disk", np.memmap(file, np.uint8, "r+", shape=shape))

    def take(self, node: Node) -> None:
        """Give `node` a slot; there must be one."""
        node.tier, node.slot = self, self.free.pop()
        self.members[node] = None

    def give_back(self, node: Node) -> None:
        self.free.append(node.slot)
        node.tier, node.slot = None, NOWHERE
        del self.members[node]


def always(node: Node) -> bool:
    return True


@attrs.define(eq=False)
class Tiers:
    """The tiers below the device, nearest first; what falls out of the last is forgotten."""

    mover: KVMover
    stack: tuple[Tier, ...]
    worth: Callable[[Node], bool] = always
    """Whether moving this block there and back costs less than computing it again."""
    num_out: int = attrs.field(default=0, init=False)
    num_in: int = attrs.field(default=0, init=False)

    def receive(self, nodes: Sequence[Node], blocks: Sequence[int]) -> list[Node]:
        """Keep what was evicted from `blocks`; returns the nodes that lost their last place."""
        keep = [i for i, node in enumerate(nodes) if self.worth(node)]
        kept = {nodes[i] for i in keep}
        lost = [node for node in nodes if node not in kept]
        if keep:
            data = self.mover.export_blocks([blocks[i] for i in keep])
            for row, i in enumerate(keep):
                lost += self._put(nodes[i], data[row], 0)
            self.num_out += len(keep)
        return lost

    def fetch(self, nodes: Sequence[Node]) -> Bytes:
        """The content of `nodes`, uint8 [n, bytes_per_block], which leave their tiers."""
        data = np.stack([node.tier.rows[node.slot] for node in nodes])
        for node in nodes:
            node.tier.give_back(node)
        self.num_in += len(nodes)
        return data

    def _put(self, node: Node, row: Bytes, level: int) -> list[Node]:
        if level == len(self.stack) or not len(self.stack[level].rows):
            return [node]
        tier, lost = self.stack[level], []
        if not tier.free:
            oldest = next(iter(tier.members))
            below = tier.rows[oldest.slot].copy()
            tier.give_back(oldest)
            lost = self._put(oldest, below, level + 1)
        tier.take(node)
        tier.rows[node.slot] = row
        return lost
