"""What the torch ops refuse, as data: the truth behind `supports`."""

from __future__ import annotations

from halogen_core.errors import UnsupportedOp
from halogen_core.spi.formats import FORMATS
from halogen_core.spi.memory import KV_ROW_BYTES
from halogen_core.spi.operations import AttentionSpec, MoESpec, OpSignature
from halogen_core.spi.ops import OPS
from halogen_core.torch_backend.scaled import READERS


def refusals(signature: OpSignature, dtype: str) -> tuple[str, ...]:
    """Why a call with this signature does not work on ops of compute dtype `dtype`."""
    reasons = []
    if signature.op not in OPS:
        reasons.append(f"op `{signature.op}` is unknown")
    if signature.dtype != dtype:
        reasons.append(f"opened for `{dtype}`, not `{signature.dtype}`")
    if signature.weight_format is not None and signature.weight_format not in (
        *FORMATS,
        *READERS,
    ):
        reasons.append(f"weight format `{signature.weight_format}` is unknown")
    if signature.block_size is not None and not 1 <= signature.block_size <= 1024:
        reasons.append(f"block size {signature.block_size} is not within 1 to 1024")
    if signature.attention is not None:
        reasons += _attention(signature.attention, signature.kv_dtype)
    if signature.kv_dtype is not None and signature.kv_dtype not in KV_ROW_BYTES:
        reasons.append(f"kv dtype `{signature.kv_dtype}` is unknown")
    if signature.moe is not None:
        reasons += _moe(signature.moe)
    return tuple(reasons)


def refuse_uneven_heads(spec: AttentionSpec) -> None:
    """Raises `UnsupportedOp` where query heads do not divide over KV heads."""
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedOp(
            f"{spec.num_heads} query heads do not divide over {spec.num_kv_heads} kv heads"
        )


def _attention(spec: AttentionSpec, kv_dtype: str | None) -> list[str]:
    reasons = []
    if spec.num_heads % spec.num_kv_heads:
        reasons.append(f"{spec.num_heads} query heads do not divide over {spec.num_kv_heads}")
    if kv_dtype == "q8_0" and spec.head_dim % 32:
        reasons.append("kv dtype `q8_0` needs a head dim that is a multiple of 32")
    rope = spec.rope
    if rope is not None and (rope.dim > spec.head_dim or len(rope.inv_freq) * 2 != rope.dim):
        reasons.append(f"rope over {rope.dim} of {spec.head_dim} with {len(rope.inv_freq)} pairs")
    return reasons


def _moe(spec: MoESpec) -> list[str]:
    reasons = []
    if spec.gating not in ("softmax", "sigmoid"):
        reasons.append(f"gating `{spec.gating}` is unknown")
    if not 1 <= spec.top_k <= spec.num_experts:
        reasons.append(f"top_k {spec.top_k} is not within 1 to {spec.num_experts}")
    return reasons
