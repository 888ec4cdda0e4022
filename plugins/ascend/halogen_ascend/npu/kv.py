"""KV on the real device: keys and values [N + 1, B, Hkv, D] per layer (form `Norm`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import attrs
import numpy as np
import torch
from torch import Tensor

from halogen_ascend.constraints import check_kv
from halogen_core.spi import (
    KVBlocks,
    KVCache,
    KVLayout,
    KVSpec,
    StepMeta,
    check_block_ids,
    check_kv_blocks,
    kv_block_shape,
)

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


@attrs.frozen(eq=False)
class NpuKV:
    """The caches of all layers; the last block is where padding rows write."""

    spec: KVSpec
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    @property
    def trash(self) -> int:
        return len(self.keys[0]) - 1

    def paged(self, layer: int) -> tuple[Tensor, Tensor]:
        """The views that the fused operator reads: [N + 1, B, Hkv * D]."""
        return self.keys[layer].flatten(2), self.values[layer].flatten(2)

    def slots(self, meta: StepMeta[Tensor]) -> Tensor:
        """int32 [T]; the scatter operator wants one index type throughout."""
        made = cast("Any", meta).once(("npu slots", id(self)), meta.slot_mapping.int)
        return cast("Tensor", made)

    def tables(self, meta: StepMeta[Tensor]) -> Tensor:
        """int32 [S, M] with unused entries pointing to the trash block."""

        def make() -> Tensor:
            table = meta.block_tables
            return torch.where(table < 0, self.trash, table).int()

        return cast("Tensor", cast("Any", meta).once(("npu tables", id(self)), make))


def npu_kv(kv: KVCache) -> NpuKV:
    """The payload, typed."""
    assert isinstance(kv.payload, NpuKV)
    return kv.payload


def layout_of(spec: KVSpec) -> KVLayout:
    """Raises `ConfigError` for a block size or dtype that the operators cannot do."""
    check_kv(spec, DTYPES)
    return KVLayout(
        spec=spec,
        id=f"ascend-norm-{spec.dtype}",
        bytes_per_block=int(np.prod(kv_block_shape(spec, 1))),
        alignment=512,
    )


def allocate(layout: KVLayout, num_blocks: int, device: torch.device) -> KVCache:
    """All caches, once."""
    spec = layout.spec
    shape = (num_blocks + 1, spec.block_size, spec.num_kv_heads, spec.head_dim)

    def caches() -> tuple[Tensor, ...]:
        return tuple(
            torch.zeros(shape, dtype=DTYPES[spec.dtype], device=device)
            for _ in range(spec.num_layers)
        )

    return KVCache(layout=layout, num_blocks=num_blocks, payload=NpuKV(spec, caches(), caches()))


def copy_blocks(kv: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """In order: a later pair may read what an earlier one wrote."""
    check_block_ids([block for pair in pairs for block in pair], kv.num_blocks)
    cache = npu_kv(kv)
    for source, target in pairs:
        for tensor in (*cache.keys, *cache.values):
            tensor[target].copy_(tensor[source])


def export_blocks(kv: KVCache, blocks: Sequence[int]) -> KVBlocks:
    """Canonical host form."""
    check_block_ids(blocks, kv.num_blocks)
    cache, index = npu_kv(kv), torch.tensor(list(blocks), dtype=torch.long)
    layers = [
        torch.stack((k[index.to(k.device)], v[index.to(v.device)]), 1)
        for k, v in zip(cache.keys, cache.values, strict=True)
    ]
    whole = torch.stack(layers, 1).cpu().contiguous()
    shape = kv_block_shape(cache.spec, len(blocks))
    return KVBlocks(spec=cache.spec, data=whole.view(torch.uint8).reshape(shape).numpy())


def import_blocks(kv: KVCache, blocks: Sequence[int], data: KVBlocks) -> None:
    """The inverse of `export_blocks`; raises `ConfigError` if the spec differs."""
    cache = npu_kv(kv)
    check_block_ids(blocks, kv.num_blocks)
    check_kv_blocks(cache.spec, blocks, data)
    spec, index = cache.spec, list(blocks)
    rows = torch.from_numpy(np.ascontiguousarray(data.data)).view(DTYPES[spec.dtype])
    for layer in range(spec.num_layers):
        for which, tensors in enumerate((cache.keys, cache.values)):
            tensors[layer][index] = rows[:, layer, which].to(tensors[layer].device)
