"""Memory below the device pool: blocks in canonical form in host memory or in a file.

All of it is taken at start; moving a block allocates nothing that lasts.
"""

from __future__ import annotations

import os
import tempfile
import time
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
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as file:
                os.posix_fallocate(file.fileno(), 0, max(1, shape[0] * shape[1]))
                return cls("disk", np.memmap(file, np.uint8, "r+", shape=shape))
        except OSError as exc:
            raise OutOfMemory(
                f"the disk tier of {num_bytes} bytes does not fit in `{directory}`: {exc.strerror}",
                code="HRT-3304",
                fix="free space there, choose another directory or a smaller tier",
            ) from exc

    def take(self, node: Node) -> None:
        """Give `node` a slot; there must be one."""
        node.tier, node.slot = self, self.free.pop()
        self.members[node] = None

    def give_back(self, node: Node) -> None:
        self.free.append(node.slot)
        node.tier, node.slot = None, NOWHERE
        del self.members[node]


def unknown_cost(depth: int) -> float | None:
    """Nothing is known about computing: moving is taken to pay."""
    return None


@attrs.define(eq=False)
class Tiers:
    """The tiers below the device, nearest first; what falls out of the last is forgotten.

    A block is moved only if there and back takes less than computing it again: the time to move
    is measured, the time to compute asked of `recompute_s`. So a preempted sequence comes back
    by whichever is cheaper, block by block.
    """

    mover: KVMover
    stack: tuple[Tier, ...]
    recompute_s: Callable[[int], float | None] = unknown_cost
    """Seconds to compute a block after `depth` others."""
    clock: Callable[[], float] = time.perf_counter
    move_s: float = attrs.field(default=0.0, init=False)
    """Seconds to move one block one way, as measured lately."""
    num_out: int = attrs.field(default=0, init=False)
    num_in: int = attrs.field(default=0, init=False)

    def pays(self, node: Node) -> bool:
        """Whether moving this block there and back is cheaper than computing it again."""
        seconds = self.recompute_s(node.depth)
        return seconds is None or 2 * self.move_s < seconds

    def receive(self, nodes: Sequence[Node], blocks: Sequence[int]) -> list[Node]:
        """Keep what was evicted from `blocks`; returns the nodes that lost their last place."""
        keep = [i for i, node in enumerate(nodes) if self.pays(node)]
        kept = set(keep)
        lost = [node for i, node in enumerate(nodes) if i not in kept]
        if keep:
            began = self.clock()
            data = self.mover.export_blocks([blocks[i] for i in keep])
            for row, i in enumerate(keep):
                lost += self._put(nodes[i], data[row], 0)
            self._measure(self.clock() - began, len(keep))
            self.num_out += len(keep)
        return lost

    def _measure(self, seconds: float, count: int) -> None:
        each = seconds / count
        self.move_s = each if not self.move_s else 0.9 * self.move_s + 0.1 * each

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
