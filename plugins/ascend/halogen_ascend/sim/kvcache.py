"""KV blocks in NZ, one buffer for K and one for V per layer, and their canonical host form.

Physical form [N + 1, Hkv, D / 16, B, 16]: the last block is the trash block that padding rows
write to. Block n lies in bank group n mod groups, so a sequence's blocks spread over the die.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from halogen_ascend.constraints import check_kv
from halogen_ascend.errors import OutOfRange, PoisonRead
from halogen_ascend.padding import PaddedStep
from halogen_ascend.sim.buffer import ITEMSIZE, DeviceBuffer
from halogen_ascend.sim.cells import TORCH
from halogen_ascend.sim.device import SimDevice
from halogen_core.spi import (
    ConfigError,
    KVBlocks,
    KVCache,
    KVLayout,
    KVSpec,
    StepBatch,
    check_block_ids,
    check_kv_blocks,
    kv_block_shape,
)

KV_DTYPES = ("f16", "bf16", "f32")


def kv_layout(spec: KVSpec) -> KVLayout:
    """The NZ layout of `spec`. Raises `ConfigError` (HRT-7108) for blocks the part cannot do."""
    check_kv(spec, KV_DTYPES)
    padded = _fractals(spec.head_dim) * 16
    row = spec.num_kv_heads * padded * ITEMSIZE[spec.dtype]
    return KVLayout(
        spec=spec,
        id=f"ascend-nz-{spec.dtype}-{spec.block_size}",
        bytes_per_block=2 * spec.num_layers * spec.block_size * row,
        alignment=512,
    )


@attrs.define(eq=False)
class KVPool:
    """The buffers of all layers."""

    device: SimDevice
    spec: KVSpec
    num_blocks: int
    keys: list[DeviceBuffer]
    values: list[DeviceBuffer]

    @classmethod
    def allocate(cls, device: SimDevice, spec: KVSpec, num_blocks: int) -> KVPool:
        """`num_blocks` and the trash block, all memory taken now."""
        shape = (
            num_blocks + 1,
            spec.num_kv_heads,
            _fractals(spec.head_dim),
            spec.block_size,
            16,
        )
        slots = (num_blocks + 1) * spec.block_size
        buffers = [
            device.empty(shape, spec.dtype, pool="dynamic", granules=slots, layout="nz")
            for _ in range(2 * spec.num_layers)
        ]
        return cls(device, spec, num_blocks, buffers[0::2], buffers[1::2])

    @property
    def trash(self) -> int:
        """The block that padding writes to."""
        return self.num_blocks

    def bank(self, block: int) -> int:
        """The group of HBM banks that holds `block`."""
        return block % self.device.hbm.groups

    def store(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write keys and values [T, Hkv, D] to slots [T]."""
        block, offset = slots // self.spec.block_size, slots % self.spec.block_size
        for buffer, rows in ((self.keys[layer], keys), (self.values[layer], values)):
            cells = self.device.write(buffer, "qkv_rope_store", "kv")
            cells[block, :, :, offset, :] = self._fractal(rows)
            _marks(buffer)[slots.numpy()] = True

    def gather(
        self, layer: int, blocks: Sequence[int], head: int, count: int, skip: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [count - skip, D] float32 of one head, from consecutive blocks."""
        index = list(blocks)
        return (
            self._rows(self.keys[layer], index, head, skip, count),
            self._rows(self.values[layer], index, head, skip, count),
        )

    def check_blocks(self, op: str, host: StepBatch) -> None:
        """Refuse tables that would read outside the pool; names sequence and block (MTE fault)."""
        tables, limit = host.block_tables, self.num_blocks + isinstance(host, PaddedStep)
        for sequence, length in enumerate(host.seq_lens.tolist()):
            need = -(-length // self.spec.block_size)
            used = tables[sequence, :need]
            if len(used) < need:
                raise OutOfRange(
                    f"`{op}`: sequence {sequence} has {length} tokens but room for "
                    f"{len(used)} blocks in its table; {need} are needed",
                    fix="build block tables for the longest length, drafts included",
                )
            wrong = used[(used < 0) | (used >= limit)]
            if len(wrong):
                raise OutOfRange(
                    f"`{op}`: sequence {sequence} names block {int(wrong[0])}; the pool has "
                    f"0 to {self.num_blocks - 1}",
                    fix="the block table is stale or corrupt; schedule the sequence anew",
                )

    def check_slots(self, host: StepBatch) -> None:
        """Slots must be in range and unique: two tokens in one slot is a lost token."""
        slots, size = host.slot_mapping, self.spec.block_size
        limit = (self.num_blocks + isinstance(host, PaddedStep)) * size
        wrong = np.flatnonzero((slots < 0) | (slots >= limit))
        if len(wrong):
            raise OutOfRange(
                f"`qkv_rope_store`: row {wrong[0]} goes to slot {slots[wrong[0]]}; allowed: 0 to "
                f"{limit - 1} ({self.num_blocks} blocks of {size})",
                fix="negative slots are not portable: padding rows use the trash block",
            )
        slots = slots[slots < self.num_blocks * size]
        if len(np.unique(slots)) != len(slots):
            values, counts = np.unique(slots, return_counts=True)
            raise OutOfRange(
                f"`qkv_rope_store`: slot {values[counts > 1][0]} is written by two rows",
                fix="each token of a step needs a slot of its own",
            )

    def copy(self, source: int, target: int) -> None:
        """One block over another, all layers."""
        for buffer in (*self.keys, *self.values):
            cells = self.device.write(buffer, "kv_copy", "kv")
            cells[target] = cells[source]
            written = _marks(buffer)
            size = self.spec.block_size
            written[target * size :][:size] = written[source * size :][:size]

    def export(self, blocks: Sequence[int]) -> KVBlocks:
        """Canonical host form, bit-exact; unwritten slots are zeros."""
        check_block_ids(blocks, self.num_blocks)
        spec = self.spec
        out = torch.empty(
            (len(blocks), spec.num_layers, 2, spec.block_size, spec.num_kv_heads, spec.head_dim),
            dtype=TORCH[spec.dtype],
        )
        for layer in range(spec.num_layers):
            for which, buffer in enumerate((self.keys[layer], self.values[layer])):
                data = self.device.read(buffer, "kv_export", "kv")[list(blocks)]
                plain = data.permute(0, 3, 1, 2, 4).flatten(3)[..., : spec.head_dim].clone()
                # not by a product: that would quieten NaNs, and the round trip must be exact
                plain[~torch.from_numpy(self._written(buffer)[list(blocks)])] = 0
                out[:, layer, which] = plain
        shape = kv_block_shape(spec, len(blocks))
        return KVBlocks(spec=spec, data=out.view(torch.uint8).reshape(shape).numpy())

    def load(self, blocks: Sequence[int], data: KVBlocks) -> None:
        """The inverse of `export`."""
        check_block_ids(blocks, self.num_blocks)
        spec = self.spec
        check_kv_blocks(spec, blocks, data)
        shape = (len(blocks), spec.num_layers, 2, spec.block_size, spec.num_kv_heads, -1)
        host = torch.from_numpy(np.ascontiguousarray(data.data)).reshape(-1)
        rows = host.view(TORCH[spec.dtype]).reshape(shape)
        for layer in range(spec.num_layers):
            for which, buffer in enumerate((self.keys[layer], self.values[layer])):
                cells = self.device.write(buffer, "kv_import", "kv")
                fractals = self._fractal(rows[:, layer, which].flatten(0, 1))
                whole = fractals.view(len(blocks), spec.block_size, *fractals.shape[1:])
                cells[list(blocks)] = whole.permute(0, 2, 3, 1, 4)
                self._written(buffer)[list(blocks)] = True

    def _written(self, buffer: DeviceBuffer) -> np.ndarray:
        return _marks(buffer).reshape(self.num_blocks + 1, self.spec.block_size)

    def _fractal(self, rows: torch.Tensor) -> torch.Tensor:
        short = -self.spec.head_dim % 16
        padded = torch.nn.functional.pad(rows, (0, short)) if short else rows
        stored = padded.to(TORCH[self.spec.dtype])
        return stored.view(*stored.shape[:-1], stored.shape[-1] // 16, 16)

    def _rows(
        self, buffer: DeviceBuffer, blocks: list[int], head: int, skip: int, count: int
    ) -> torch.Tensor:
        if not self._written(buffer)[blocks].reshape(-1)[skip:count].all():
            raise PoisonRead(
                f"`attention` reads KV slots of blocks {blocks} that nothing has written",
                fix="a sequence's length runs ahead of its writes, or a block was taken away",
            )
        data = self.device.read(buffer, "attention", "kv")[blocks, head]
        plain = data.permute(0, 2, 1, 3).reshape(-1, data.shape[1] * 16)
        return plain[skip:count, : self.spec.head_dim].float()


def _marks(buffer: DeviceBuffer) -> np.ndarray:
    """Which slots of a pool buffer were written."""
    written = buffer.allocation.written
    assert written is not None
    return written


def _fractals(head_dim: int) -> int:
    return -(-head_dim // 16)


def pool_of(kv: KVCache) -> KVPool:
    """The payload of a cache of ours."""
    pool = kv.payload
    if not isinstance(pool, KVPool):
        raise ConfigError(f"this KV cache holds {type(pool).__name__}, not a pool of `ascend`")
    return pool
