"""flash-attn (Dao-AILab) as a kernel pack: paged attention by its `flash_attn_varlen_func`.

One call serves prompts, decoding and mixed steps. Its pages are whole multiples of 256 tokens, so
it is reached with `--block-size 256`; what it cannot do stays with the backend's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from halogen_core.spi import (
    AttentionSpec,
    KVCache,
    OpImplementation,
    OpSignature,
    PackedWeight,
    StepMeta,
    Support,
    SupportLevel,
    UnsupportedOp,
)
from halogen_triton.kv import payload

PAGE = 256
LARGEST_HEAD = 256
_HERE = "halogen_triton.flash_attn_pack"


def installed() -> bool:
    """Whether flash-attn is there, without loading it."""
    return find_spec("flash_attn") is not None


def offers(backend: str) -> list[OpImplementation]:
    """The pack for `backend`, where flash-attn is installed."""
    if not installed():
        return []
    return [
        OpImplementation(
            op="attention",
            backend=backend,
            factory=f"{_HERE}:make",
            supports=f"{_HERE}:supports",
            priority=10,
        )
    ]


def supports(signature: OpSignature) -> Support:
    """What flash-attn's paged attention takes."""
    reasons = []
    if signature.dtype not in ("f16", "bf16"):
        reasons.append(f"flash-attn takes f16 and bf16, not {signature.dtype}")
    if signature.kv_dtype not in (None, signature.dtype):
        reasons.append(f"its cache is of the activations' dtype, not {signature.kv_dtype}")
    if signature.block_size is not None and signature.block_size % PAGE:
        reasons.append(f"its pages are multiples of {PAGE} tokens, not {signature.block_size}")
    head = signature.attention.head_dim if signature.attention is not None else 8
    if head % 8 or head > LARGEST_HEAD:
        reasons.append(f"its heads are multiples of 8 up to {LARGEST_HEAD}, not {head}")
    level = SupportLevel.NO if reasons else SupportLevel.NATIVE
    return Support(level=level, reasons=tuple(reasons))


def make(backend: Any) -> Callable[..., Tensor]:
    """`Ops.attention` by flash-attn."""
    from flash_attn import flash_attn_varlen_func

    def attention(
        q: Tensor,
        kv: KVCache,
        layer: int,
        meta: StepMeta[Tensor],
        spec: AttentionSpec,
        *,
        sinks: PackedWeight[Tensor] | None = None,
    ) -> Tensor:
        if sinks is not None:
            raise UnsupportedOp("flash-attn has no attention sinks")
        if q.shape[0] == 0:
            return q
        data = payload(kv).layers[layer].data
        host = meta.host
        counts = host.query_start_loc[1:] - host.query_start_loc[:-1]
        out: Tensor = flash_attn_varlen_func(
            q.to(data.dtype).view(-1, spec.num_heads, spec.head_dim),
            # [N, Hkv, B, D] as [N, B, Hkv, D]: only the last axis must be contiguous
            data[:, 0].transpose(1, 2),
            data[:, 1].transpose(1, 2),
            cu_seqlens_q=meta.query_start_loc,
            cu_seqlens_k=_starts(meta.seq_lens),
            max_seqlen_q=int(counts.max(initial=0)),
            # a bound, so that a captured step may run again with longer sequences
            max_seqlen_k=meta.block_tables.shape[1] * kv.layout.spec.block_size,
            softmax_scale=spec.scale,
            causal=True,
            # theirs counts the keys to the left, ours the query's own as well
            window_size=(-1 if spec.window is None else spec.window - 1, 0 if spec.window else -1),
            softcap=spec.softcap or 0.0,
            block_table=meta.block_tables,
        )
        return out.reshape(q.shape[0], -1)

    return attention


def _starts(lengths: Tensor) -> Tensor:
    """Exclusive sums [S + 1] int32 of lengths [S]."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
