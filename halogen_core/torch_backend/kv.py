"""The paged KV pool: uint8 or float storage, writing, reading and the canonical host form.

Physical layout, one tensor for everything: [L, N + 1, 2, Hkv, B, row], K before V. Heads lie
outside the tokens of a block so that reading blocks gives one contiguous [tokens, D] matrix per
head. Block N is the trash block: padding rows write there and unused table entries point to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from halogen_core.errors import ConfigError, OutOfDeviceMemory
from halogen_core.spi.memory import (
    KV_ROW_BYTES,
    KVBlocks,
    KVCache,
    KVLayout,
    KVSpec,
    check_block_ids,
    check_kv_blocks,
    kv_block_shape,
    kv_row_bytes,
)
from halogen_core.torch_backend.dequant import dequantize, quantize_q8_0

_STORAGE = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    # no torch device indexes float8, so these are stored as bytes
    "f8_e5m2": torch.uint8,
    "q8_0": torch.uint8,
}
_F8_MAX = 57344.0
LAYOUT_ID = "torch/L,N,2,H,B,D"


@attrs.frozen(eq=False)
class TorchKV:
    """`KVCache.payload` of the torch backend."""

    pool: Tensor
    """[L, N + 1, 2, Hkv, B, row]"""
    layers: tuple[Tensor, ...]
    """Each layer as rows [(N + 1) * 2 * Hkv * B, row], views of `pool`."""
    dtype: str


def torch_kv(kv: KVCache) -> TorchKV:
    """The payload, typed."""
    payload = kv.payload
    assert isinstance(payload, TorchKV)
    return payload


def layout_of(spec: KVSpec, *, max_block_size: int = 1024) -> KVLayout:
    """The layout for `spec`; raises `ConfigError` for what cannot be stored."""
    if spec.dtype not in KV_ROW_BYTES:
        raise ConfigError(
            f"kv dtype is `{spec.dtype}`; allowed are {', '.join(KV_ROW_BYTES)}",
            code="HRT-3101",
            fix="set cache.kv_dtype or --kv-dtype",
        )
    if spec.dtype == "q8_0" and spec.head_dim % 32:
        raise ConfigError(
            f"kv dtype `q8_0` needs a head dim that is a multiple of 32, the model has "
            f"{spec.head_dim}",
            code="HRT-3101",
            fix="use f16 or f8_e5m2",
        )
    if not 1 <= spec.block_size <= max_block_size:
        raise ConfigError(
            f"block size is {spec.block_size}; allowed are 1 to {max_block_size}",
            code="HRT-3102",
            fix="set cache.block_size or --block-size",
        )
    per_block = int(np.prod(kv_block_shape(spec, 1)))
    return KVLayout(spec=spec, id=f"{LAYOUT_ID}/{spec.dtype}", bytes_per_block=per_block)


def allocate(layout: KVLayout, num_blocks: int, device: torch.device, *, free: int = 0) -> KVCache:
    """A zeroed pool of `num_blocks` blocks and the trash block; a host's takes memory when touched.

    Raises `OutOfDeviceMemory`, which tells the `free` bytes.
    """
    spec = layout.spec
    storage = _STORAGE[spec.dtype]
    row = kv_row_bytes(spec) // storage.itemsize
    shape = (spec.num_layers, num_blocks + 1, 2, spec.num_kv_heads, spec.block_size, row)
    try:
        # zeroed: a masked key weighs 0, and 0 times a stray NaN would still be NaN
        pool = _zeros(shape, storage, device)
    except (RuntimeError, MemoryError, ValueError) as exc:
        asked = int(np.prod(shape, dtype=np.float64)) * storage.itemsize
        raise OutOfDeviceMemory(
            "dynamic", asked=asked, free=free, fix="lower --pool-size or --max-context"
        ) from exc
    layers = tuple(layer.view(-1, row) for layer in pool)
    return KVCache(layout=layout, num_blocks=num_blocks, payload=TorchKV(pool, layers, spec.dtype))


def _zeros(shape: tuple[int, ...], storage: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=storage, device=device)
    # torch would write the zeros; numpy's come from the system page by page, on first touch
    bytes_ = np.zeros(int(np.prod(shape, dtype=object)) * storage.itemsize, np.uint8)
    return torch.from_numpy(bytes_).view(storage).view(shape)


def encode(values: Tensor, dtype: str) -> Tensor:
    """Rows [..., D] of activations in storage form [..., row]."""
    if dtype == "q8_0":
        return quantize_q8_0(values.float())
    if dtype == "f8_e5m2":
        wide = values.float()
        # numbers are cut to the largest there is; an infinity is none, and has to show
        cut = torch.where(wide.isinf(), wide, wide.clamp(-_F8_MAX, _F8_MAX))
        return cut.to(torch.float8_e5m2).view(torch.uint8)
    return values.to(_STORAGE[dtype])


def decode(rows: Tensor, dtype: str) -> Tensor:
    """Storage rows [..., row] as values [..., D] of a float dtype, not copied where it has one."""
    if dtype == "q8_0":
        return dequantize(rows, "Q8_0")
    return rows.view(torch.float8_e5m2) if dtype == "f8_e5m2" else rows


def copy_blocks(kv: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks (source, destination) in order, all layers."""
    pool = torch_kv(kv).pool
    for source, destination in pairs:
        check_block_ids((source, destination), kv.num_blocks)
        pool[:, destination].copy_(pool[:, source])


def export_blocks(kv: KVCache, blocks: Sequence[int]) -> KVBlocks:
    """Blocks in canonical form uint8 [n, L, 2, B, Hkv, row bytes]."""
    check_block_ids(blocks, kv.num_blocks)
    pool = torch_kv(kv).pool
    chosen = pool.index_select(1, torch.as_tensor(blocks, dtype=torch.int64, device=pool.device))
    canonical = chosen.permute(1, 0, 2, 4, 3, 5).contiguous().view(torch.uint8)
    return KVBlocks(spec=kv.layout.spec, data=canonical.cpu().numpy())


def import_blocks(kv: KVCache, blocks: Sequence[int], data: KVBlocks) -> None:
    """Write canonical blocks; raises `ConfigError` if spec or shape differ."""
    check_block_ids(blocks, kv.num_blocks)
    check_kv_blocks(kv.layout.spec, blocks, data)
    pool = torch_kv(kv).pool
    host = torch.from_numpy(np.ascontiguousarray(data.data)).view(pool.dtype)
    at = torch.as_tensor(blocks, dtype=torch.int64, device=pool.device)
    pool.index_copy_(1, at, host.permute(1, 0, 2, 4, 3, 5).to(pool.device))
