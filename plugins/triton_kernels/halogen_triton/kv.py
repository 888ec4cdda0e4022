"""The paged KV pool of the Triton backends, and its canonical host form.

One tensor for all layers, [L, N + 1, 2, Hkv, B, D], K before V: a block is contiguous per KV head.
q8_0 keeps its f16 scales in a second tensor [L, N + 1, 2, Hkv, B, D / 32], so that codes stay
aligned.
Block N is the trash block: padding rows of a captured step write there.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from halogen_core.spi import (
    ConfigError,
    KVBlocks,
    KVCache,
    KVLayout,
    KVSpec,
    check_block_ids,
    check_kv_blocks,
    kv_block_shape,
)
from halogen_triton.attention import STORES, LayerKV

_STORAGE = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8_e5m2": torch.uint8,
    "q8_0": torch.int8,
}
BLOCK_SIZES = (64, 32, 16, 128, 256)
LAYOUT_ID = "triton/L,N,2,H,B,D"


@attrs.frozen(eq=False)
class TritonKV:
    """`KVCache.payload`."""

    data: Tensor
    scales: Tensor | None
    layers: tuple[LayerKV, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,) if self.scales is None else (self.data, self.scales)


def payload(kv: KVCache) -> TritonKV:
    """The payload, typed."""
    found = kv.payload
    assert isinstance(found, TritonKV)
    return found


def layout_of(spec: KVSpec) -> KVLayout:
    """The layout for `spec`; raises `ConfigError` for what cannot be stored."""
    if spec.dtype not in _STORAGE:
        raise ConfigError(
            f"kv dtype is `{spec.dtype}`; allowed are {', '.join(_STORAGE)}",
            code="HRT-3401",
            fix="set cache.kv_dtype or --kv-dtype",
        )
    if spec.dtype == "q8_0" and spec.head_dim % 32:
        raise ConfigError(
            f"kv dtype `q8_0` needs a head dim that is a multiple of 32, the model has "
            f"{spec.head_dim}",
            code="HRT-3401",
            fix="use f16, bf16 or f8_e5m2",
        )
    if spec.block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"block size is {spec.block_size}; allowed are {sorted(BLOCK_SIZES)}",
            code="HRT-3402",
            fix="set cache.block_size or --block-size",
        )
    size = int(np.prod(kv_block_shape(spec, 1)))
    return KVLayout(spec=spec, id=f"{LAYOUT_ID}/{spec.dtype}", bytes_per_block=size, alignment=256)


def allocate(layout: KVLayout, num_blocks: int, device: torch.device) -> KVCache:
    """A zeroed pool of `num_blocks` blocks and the trash block."""
    spec = layout.spec
    lead = (spec.num_layers, num_blocks + 1, 2, spec.num_kv_heads, spec.block_size)
    # zeroed: a masked key weighs 0, and 0 times a stray NaN would still be NaN
    data = torch.zeros(*lead, spec.head_dim, dtype=_STORAGE[spec.dtype], device=device)
    scales = None
    if spec.dtype == "q8_0":
        scales = torch.zeros(*lead, spec.head_dim // 32, dtype=torch.float16, device=device)
    layers = tuple(
        LayerKV(
            data=data[i],
            scales=None if scales is None else scales[i],
            store=STORES[spec.dtype],
        )
        for i in range(spec.num_layers)
    )
    return KVCache(layout=layout, num_blocks=num_blocks, payload=TritonKV(data, scales, layers))


def copy_blocks(kv: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks (source, destination) in order, all layers."""
    for pair in pairs:
        check_block_ids(pair, kv.num_blocks)
        for tensor in payload(kv).tensors:
            tensor[:, pair[1]].copy_(tensor[:, pair[0]])


def export_blocks(kv: KVCache, blocks: Sequence[int]) -> KVBlocks:
    """Blocks in canonical form uint8 [n, L, 2, B, Hkv, row bytes]; of q8_0 as ggml blocks."""
    check_block_ids(blocks, kv.num_blocks)
    own = payload(kv)
    at = torch.as_tensor(blocks, dtype=torch.int64, device=own.data.device)
    rows = [t.index_select(1, at).permute(1, 0, 2, 4, 3, 5).contiguous() for t in own.tensors]
    if own.scales is None:
        canonical = rows[0].view(torch.uint8)
    else:
        scales = rows[1].unsqueeze(-1).view(torch.uint8)
        codes = rows[0].unflatten(-1, (-1, 32)).view(torch.uint8)
        canonical = torch.cat([scales, codes], -1).flatten(-2)
    return KVBlocks(spec=kv.layout.spec, data=canonical.cpu().numpy())


def import_blocks(kv: KVCache, blocks: Sequence[int], data: KVBlocks) -> None:
    """Write canonical blocks; raises `ConfigError` if spec or shape differ."""
    check_block_ids(blocks, kv.num_blocks)
    check_kv_blocks(kv.layout.spec, blocks, data)
    own = payload(kv)
    host = torch.from_numpy(np.ascontiguousarray(data.data))
    parts = [host]
    if own.scales is not None:
        groups = host.unflatten(-1, (-1, 34))
        parts = [groups[..., 2:].flatten(-2), groups[..., :2].contiguous().flatten(-2)]
    at = torch.as_tensor(blocks, dtype=torch.int64, device=own.data.device)
    for tensor, part in zip(own.tensors, parts, strict=True):
        rows = part.contiguous().view(tensor.dtype).permute(1, 0, 2, 4, 3, 5)
        tensor.index_copy_(1, at, rows.to(tensor.device))
