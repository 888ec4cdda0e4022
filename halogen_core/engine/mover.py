"""Carries KV blocks between a backend's pool and host memory, in canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import attrs

from halogen_core.spi import Backend, KVBlocks, KVCache, kv_block_shape
from halogen_core.spi.arrays import Bytes


@attrs.frozen(eq=False)
class BackendMover:
    """`kv.tiers.KVMover` over a backend."""

    backend: Backend[Any]
    kv: KVCache

    @property
    def bytes_per_block(self) -> int:
        return prod(kv_block_shape(self.kv.layout.spec, 1))

    def export_blocks(self, blocks: Sequence[int]) -> Bytes:
        """uint8 [n, bytes_per_block]"""
        return self.backend.kv_export(self.kv, blocks).data.reshape(len(blocks), -1)

    def import_blocks(self, blocks: Sequence[int], data: Bytes) -> None:
        """The inverse of `export_blocks`."""
        spec = self.kv.layout.spec
        shaped = data.reshape(kv_block_shape(spec, len(blocks)))
        self.backend.kv_import(self.kv, blocks, KVBlocks(spec=spec, data=shaped))
