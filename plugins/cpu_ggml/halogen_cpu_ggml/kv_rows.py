"""The KV pool for ggml's own ops: one row of Hkv D elements per slot."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.spi import KVBlocks, KVLayout, kv_block_shape
from halogen_cpu_ggml.tape import Node, Tape

LAYOUT = "rows-1"
GGML_TYPE = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
RESERVED_BLOCKS = 1
"""Behind the last block: slot 0 takes padding's writes, slot 1 stays zero for padding's reads."""


@attrs.define(eq=False)
class RowPool:
    """uint8 [L, 2, N + 1, B, Hkv, row]: the canonical order of a block, layer by layer."""

    layout: KVLayout
    data: NDArray[np.uint8]

    @classmethod
    def allocate(cls, layout: KVLayout, num_blocks: int) -> RowPool:
        spec = layout.spec
        shape = (spec.num_layers, 2, num_blocks + RESERVED_BLOCKS, *kv_block_shape(spec, 1)[3:])
        return cls(layout, np.zeros(shape, np.uint8))

    @property
    def reserved_slot(self) -> int:
        """First slot of the reserved block."""
        return int(self.data.shape[2] - RESERVED_BLOCKS) * self.layout.spec.block_size

    def tensor(self, tape: Tape, layer: int, side: int) -> Node:
        """All slots of one layer's K (side 0) or V (1) as a ggml matrix."""
        spec = self.layout.spec
        view = self.data[layer, side]
        ne = (spec.num_kv_heads * spec.head_dim, view.shape[0] * spec.block_size)
        return tape.external(view.ctypes.data, GGML_TYPE[spec.dtype], ne, keep=self)

    def gather(self, tape: Tape, layer: int, side: int, slots: Node) -> Node:
        """Rows of `slots` [c] as float32 [c, Hkv D]."""
        spec = self.layout.spec
        shape = (slots.shape[0], spec.num_kv_heads * spec.head_dim)
        return tape.op("get_rows", self.tensor(tape, layer, side), slots, shape=shape)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.data[:, :, target] = self.data[:, :, source]

    def export(self, blocks: Sequence[int]) -> KVBlocks:
        data = self.data[:, :, list(blocks)].transpose(2, 0, 1, 3, 4, 5)
        return KVBlocks(spec=self.layout.spec, data=np.ascontiguousarray(data))

    def load(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        self.data[:, :, list(blocks)] = data.transpose(1, 2, 0, 3, 4, 5)
