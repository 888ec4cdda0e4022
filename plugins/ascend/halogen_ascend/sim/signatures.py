"""What the simulated part refuses, as data: the truth behind `supports`."""

from __future__ import annotations

from halogen_ascend.constraints import BLOCK_SIZES, MAX_GROUP, MAX_HEADS
from halogen_ascend.sim.kvcache import KV_DTYPES
from halogen_ascend.weights.dequantize import INT8_FORMATS
from halogen_core.spi import (
    FLOAT8,
    FORMATS,
    OPS,
    AttentionSpec,
    MoESpec,
    OpSignature,
    UnsupportedOp,
)


def refusals(signature: OpSignature, compute: str) -> tuple[str, ...]:
    """Why a call of this signature cannot run on ops of compute dtype `compute`."""
    said = []
    if signature.op not in OPS:
        said.append(f"op `{signature.op}` is unknown")
    if signature.dtype != compute:
        said.append(f"opened for `{compute}`, not `{signature.dtype}`")
    if signature.weight_format not in (None, *FORMATS, *INT8_FORMATS, *FLOAT8):
        said.append(f"weight format `{signature.weight_format}` is unknown")
    if signature.kv_dtype not in (None, *KV_DTYPES):
        said.append(f"KV dtype `{signature.kv_dtype}` is not one of {', '.join(KV_DTYPES)}")
    if signature.block_size not in (None, *BLOCK_SIZES):
        said.append(f"block size {signature.block_size} is not one of {BLOCK_SIZES}")
    if signature.attention is not None:
        said += attention_refusals(signature.attention)
    if signature.moe is not None:
        said += moe_refusals(signature.moe)
    return tuple(said)


def attention_refusals(spec: AttentionSpec) -> list[str]:
    """What is wrong with an attention layer."""
    said = []
    if spec.num_heads % spec.num_kv_heads:
        said.append(f"{spec.num_heads} query heads do not divide over {spec.num_kv_heads}")
    elif spec.num_heads // spec.num_kv_heads > MAX_GROUP:
        said.append(
            f"{spec.num_heads // spec.num_kv_heads} query heads per KV head, {MAX_GROUP} go"
        )
    if spec.num_heads > MAX_HEADS:
        said.append(f"{spec.num_heads} query heads, {MAX_HEADS} go")
    rope = spec.rope
    if rope is not None and (rope.dim > spec.head_dim or len(rope.inv_freq) * 2 != rope.dim):
        said.append(f"rope over {rope.dim} of {spec.head_dim} with {len(rope.inv_freq)} pairs")
    return said


def moe_refusals(spec: MoESpec) -> list[str]:
    """What is wrong with a mixture-of-experts layer."""
    said = []
    if spec.gating not in ("softmax", "sigmoid"):
        said.append(f"gating `{spec.gating}` is unknown")
    if not 1 <= spec.top_k <= spec.num_experts:
        said.append(f"top_k {spec.top_k} is not within 1 to {spec.num_experts}")
    return said


def refuse_attention(op: str, spec: AttentionSpec) -> None:
    """Raise `UnsupportedOp` for what `supports` denies."""
    if said := attention_refusals(spec):
        raise UnsupportedOp(f"`{op}` cannot run: {'; '.join(said)}", fix="choose another backend")


def refuse_moe(spec: MoESpec) -> None:
    """Raise `UnsupportedOp` for what `supports` denies."""
    if said := moe_refusals(spec):
        raise UnsupportedOp(f"`moe` cannot run: {'; '.join(said)}", fix="choose another backend")
