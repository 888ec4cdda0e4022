"""The KV pool for our kernels: K in tiles of 16 tokens by head dim, V in rows."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.spi import KVBlocks, KVLayout, KVSpec, kv_block_shape
from halogen_cpu_ggml.native import GROUP, KV_TYPES, TILE, Pool
from halogen_cpu_ggml.tiles import huge_zeros

LAYOUT = "tiles-1"
ELEMENT = {"f32": 4, "f16": 2, "bf16": 2, "f8_e5m2": 1, "q8_0": 1}
OUTWARD = (1, 0, 3, 4, 2, 5, 6)
"""[L, n, Hkv, B / 16, 16, ..] to [n, L, B / 16, 16, Hkv, ..]."""
Q8 = 32
"""Elements under one scale."""


def padded_head(spec: KVSpec) -> int:
    """Head dim as stored: whole vectors."""
    return -(-spec.head_dim // TILE) * TILE


def row_bytes(spec: KVSpec) -> int:
    """Of one token and head, K or V, as stored."""
    dp = padded_head(spec)
    return dp * ELEMENT[spec.dtype] + (dp // Q8 * 2 if spec.dtype == "q8_0" else 0)


def block_bytes(spec: KVSpec) -> int:
    """Of one block over all layers, K and V."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.block_size * row_bytes(spec)


@attrs.define(eq=False)
class TilePool:
    """uint8 [N / 16, L, 2, 16, Hkv, B * row]: per head K tiles [B / 16][D][16], or V rows [B][D].

    16 blocks of all layers lie together, so few tokens touch few (huge) pages.

    q8_0: a K tile has its scales [D / 32][16] behind, a V row its [D / 32].
    """

    layout: KVLayout
    data: NDArray[np.uint8]
    reserved_slot: int = 0
    """Never used: padding rows are not computed."""

    @classmethod
    def allocate(cls, layout: KVLayout, num_blocks: int) -> TilePool:
        spec = layout.spec
        width = spec.block_size * row_bytes(spec)
        groups = -(-num_blocks // GROUP)
        shape = (groups, spec.num_layers, 2, GROUP, spec.num_kv_heads, width)
        return cls(layout, huge_zeros(int(np.prod(shape))).reshape(shape))

    def pool(self, layer: int) -> Pool:
        """One layer, for the kernels."""
        spec = self.layout.spec
        row = row_bytes(spec)
        return Pool(
            k=self.data[0, layer, 0].ctypes.data,
            v=self.data[0, layer, 1].ctypes.data,
            type=KV_TYPES[spec.dtype],
            block=spec.block_size,
            hkv=spec.num_kv_heads,
            d=spec.head_dim,
            dp=padded_head(spec),
            k_tile=TILE * row,
            v_row=row,
            group=self.data.strides[0],
        )

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            to, at = divmod(target, GROUP), divmod(source, GROUP)
            self.data[to[0], :, :, to[1]] = self.data[at[0], :, :, at[1]]

    def _gather(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """A copy of blocks, [L, 2, n, Hkv, B * row]."""
        group, at = np.divmod(np.asarray(blocks, np.int64), GROUP)
        return np.ascontiguousarray(self.data[group, :, :, at].transpose(1, 2, 0, 3, 4))

    def export(self, blocks: Sequence[int]) -> KVBlocks:
        out = np.empty(kv_block_shape(self.layout.spec, len(blocks)), np.uint8)
        stored = self._gather(blocks)
        for side in (0, 1):
            for inside, outside in self._pairs(stored[:, side], out[:, :, side], side):
                outside[...] = inside.transpose(OUTWARD)
        return KVBlocks(spec=self.layout.spec, data=out)

    def load(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        stored = self._gather(blocks)
        for side in (0, 1):
            for inside, outside in self._pairs(stored[:, side], data[:, :, side], side):
                inside.transpose(OUTWARD)[...] = outside
        group, at = np.divmod(np.asarray(blocks, np.int64), GROUP)
        self.data[group, :, :, at] = stored.transpose(2, 0, 1, 3, 4)

    def _pairs(
        self, stored: NDArray[np.uint8], canonical: NDArray[np.uint8], side: int
    ) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Views of the same bytes in stored [L, n, Hkv, B / 16, 16, ..] and canonical order
        [n, L, B / 16, 16, Hkv, ..]: codes, and scales where there are any.
        """
        spec = self.layout.spec
        d, dp, size = spec.head_dim, padded_head(spec), ELEMENT[spec.dtype]
        tiles, row, scales = spec.block_size // TILE, row_bytes(spec), dp // Q8
        quantised = spec.dtype == "q8_0"
        tail = scales if quantised else 0
        if side == 0:
            by_tile = stored.reshape(*stored.shape[:3], tiles, TILE * row)
            codes = by_tile[..., : dp * TILE * size]
            codes = codes.reshape(*codes.shape[:4], dp, TILE, size).swapaxes(4, 5)
            factors = by_tile[..., dp * TILE * size :]
            factors = factors.reshape(*factors.shape[:4], tail, TILE, 2).swapaxes(4, 5)
        else:
            rows = stored.reshape(*stored.shape[:3], tiles, TILE, row)
            codes = rows[..., : dp * size].reshape(*rows.shape[:5], dp, size)
            factors = rows[..., dp * size :].reshape(*rows.shape[:5], tail, 2)
        n, layers, _, hkv, width = canonical.shape
        outer = canonical.reshape(n, layers, tiles, TILE, hkv, width)
        if not quantised:
            return [(codes[..., :d, :], outer.reshape(*outer.shape[:5], d, size))]
        units = outer.reshape(*outer.shape[:5], d // Q8, Q8 + 2)
        codes = codes.reshape(*codes.shape[:5], d // Q8, Q8) if side else _blocked(codes)
        return [(codes, units[..., 2:]), (factors, units[..., :2])]


def _blocked(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[.., 16, D, 1], D strided, as a view [.., 16, D / 32, 32]."""
    *lead, d, _ = codes.shape
    *strides, step, _ = codes.strides
    shape, jumps = (*lead, d // Q8, Q8), (*strides, step * Q8, step)
    return np.lib.stride_tricks.as_strided(codes, shape, jumps)
