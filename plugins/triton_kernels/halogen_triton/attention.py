"""Paged attention for one step: chooses kernels and launch shapes, and calls them."""

from __future__ import annotations

import attrs
import torch
import triton
from torch import Tensor

from halogen_triton import attention_decode_kernels, attention_kernels
from halogen_triton.interpreter import repair
from halogen_triton.launch import Launch

repair()

STORES = {"f32": 0, "f16": 0, "bf16": 0, "q8_0": 1, "f8_e5m2": 2}


@attrs.frozen(kw_only=True, eq=False)
class LayerKV:
    """K and V of one layer: [N, 2, Hkv, B, D] (int8 or uint8 for quantised storage), with the f16
    scales [N, 2, Hkv, B, D / 32] of q8_0.
    """

    data: Tensor
    store: int = 0
    scales: Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.data.shape[3]

    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """K, its scales, V, its scales; anything where there are no scales."""
        scales = self.data if self.scales is None else self.scales
        return self.data[:, 0], scales[:, 0], self.data[:, 1], scales[:, 1]


@attrs.frozen(kw_only=True, eq=False)
class Sequences:
    """Who attends: int32 device arrays and the host's bounds on them (as in `StepBatch`)."""

    starts: Tensor
    """[S + 1]"""
    seq_lens: Tensor
    tables: Tensor
    """[S, M]"""
    num_tokens: int
    max_query_len: int
    has_decodes: bool
    """Some sequence has at most `AttentionPlan.max_decode` queries."""
    has_prefills: bool
    flash: bool = True
    """Split the KV of decoding sequences over programs."""


@attrs.frozen(kw_only=True)
class HeadShape:
    """Heads and score arithmetic of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0


@attrs.frozen(kw_only=True)
class AttentionPlan:
    """Launch shapes for one device and head dim."""

    prefill: Launch
    decode: Launch
    programs: int
    """Of a split decode."""
    max_decode: int = 1
    """Queries per sequence up to which the decode kernel serves it."""


def attention(
    q: Tensor,
    kv: LayerKV,
    sequences: Sequences,
    shape: HeadShape,
    plan: AttentionPlan,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal paged attention: q [T, Hq D] (rows may be strided) to [T, Hq D]."""
    out = torch.empty(q.shape[0], shape.num_heads * shape.head_dim, dtype=q.dtype, device=q.device)
    if q.shape[0] == 0:
        return out
    if sequences.has_decodes:
        _decode(q, kv, sequences, shape, plan, sinks, out)
    if sequences.has_prefills:
        _prefill(q, kv, sequences, shape, plan, sinks, out)
    return out


def _shape_constants(sequences: Sequences, shape: HeadShape, plan: AttentionPlan) -> dict[str, int]:  # type: ignore[no-untyped-def]
    return {
        "HQ": shape.num_heads,
        "HKV": shape.num_kv_heads,
        "D": shape.head_dim,
        "D_PAD": max(16, triton.next_power_of_2(shape.head_dim)),
        "S_PAD": max(2, triton.next_power_of_2(len(sequences.seq_lens))),
        "MAX_DECODE": plan.max_decode,
        "WINDOW": shape.window,
    }


def _prefill(
    q: Tensor,
    kv: LayerKV,
    sequences: Sequences,
    shape: HeadShape,
    plan: AttentionPlan,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    group = shape.num_heads // shape.num_kv_heads
    constants = _shape_constants(sequences, shape, plan)
    block_m = max(plan.prefill.block_m, triton.next_power_of_2(group))
    num = len(sequences.seq_lens)
    grid = (triton.cdiv(sequences.num_tokens, block_m // group) + num, shape.num_kv_heads)
    attention_kernels.prefill[grid](
        q,
        *kv.pointers(),
        sequences.tables,
        sequences.seq_lens,
        sequences.starts,
        out if sinks is None else sinks,
        out,
        shape.scale,
        shape.softcap,
        num,
        sequences.tables.stride(0),
        q.stride(0),
        **constants,
        PAGE=kv.block_size,
        BM=block_m,
        BN=plan.prefill.block_n,
        SOFTCAP=shape.softcap > 0,
        SINKS=sinks is not None,
        STORE=kv.store,
        UNMASKED=plan.prefill.unmasked,
        **plan.prefill.options,
    )


def _decode(
    q: Tensor,
    kv: LayerKV,
    sequences: Sequences,
    shape: HeadShape,
    plan: AttentionPlan,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    group = shape.num_heads // shape.num_kv_heads
    constants = _shape_constants(sequences, shape, plan)
    block_m = max(16, triton.next_power_of_2(group * plan.max_decode))
    block_n = plan.decode.block_n
    num = len(sequences.seq_lens)
    programs = plan.programs if sequences.flash else num * shape.num_kv_heads
    partial, lse = out, out
    if sequences.flash:
        rows = programs * 2 * block_m
        partial = torch.empty(rows, constants["D_PAD"], dtype=torch.float32, device=q.device)
        lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    attention_decode_kernels.decode[(programs,)](
        q,
        *kv.pointers(),
        sequences.tables,
        sequences.seq_lens,
        sequences.starts,
        out if sinks is None else sinks,
        out,
        partial,
        lse,
        shape.scale,
        shape.softcap,
        num,
        sequences.tables.stride(0),
        q.stride(0),
        **constants,
        PAGE=kv.block_size,
        BM=block_m,
        BN=block_n,
        SOFTCAP=shape.softcap > 0,
        SINKS=sinks is not None,
        STORE=kv.store,
        DIRECT=not sequences.flash,
        UNMASKED=plan.decode.unmasked,
        PDL=plan.decode.pdl,
        **plan.decode.options,
    )
    if sequences.flash:
        # most of the time one (sequence, head) is shared by about this many programs
        parts = min(64, triton.next_power_of_2(programs // (num * shape.num_kv_heads) + 2))
        attention_decode_kernels.decode_reduce[(num, shape.num_heads * plan.max_decode)](
            sequences.seq_lens,
            sequences.starts,
            out if sinks is None else sinks,
            out,
            partial,
            lse,
            num,
            programs,
            **constants,
            BM=block_m,
            BN=block_n,
            SINKS=sinks is not None,
            PARTS=parts,
            PDL=plan.decode.pdl,
            num_warps=4,
            **({"launch_pdl": True} if plan.decode.pdl else {}),
        )
