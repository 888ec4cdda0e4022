"""Paged attention for one step: chooses kernels and launch shapes, and calls them."""

from __future__ import annotations

import attrs
import torch
import triton
from torch import Tensor

from halogen_triton import attention_decode_kernels, attention_kernels
from halogen_triton.interpreter import active, repair
from halogen_triton.launch import Launch, Tuning

repair()

HOPPER = "prefill_hopper"
"""Its name in launch tables."""
HOPPER_ROWS = 128
"""Query rows of a program of `attention_hopper`."""
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

    @property
    def single(self) -> bool:
        """Every sequence has exactly one query."""
        return self.max_query_len == 1 and self.num_tokens == len(self.seq_lens)


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
    """Its `block_m`: parts of a split that are joined at once (0: 4)."""
    programs: int
    """Of a split decode, at most."""
    hopper: Launch | None = None
    """Prefill by `attention_hopper`, where that serves; its `stages` alone count."""
    direct: bool = True
    """Short contexts are not split."""
    max_decode: int = 1
    """Queries per sequence up to which the decode kernel serves it."""

    def split(self, groups: int) -> int:
        """Programs for so many (sequence, KV head) pairs: as many for each, where that leaves
        less than an eighth unused, so that at equal lengths no program serves two.
        """
        even = self.programs // groups * groups
        return even if 8 * even >= 7 * self.programs else self.programs


def attention_plan(
    table: Tuning, head_dim: int, *, quantised: bool, pairs: int = 0, length: int = 0
) -> AttentionPlan:
    """Launch shapes for a head dim; `quantised` KV has scales.

    `pairs` are (sequence, KV head) pairs, `length` that of the longest sequence.
    """
    quant = int(quantised)
    decode = table.rule("decode", d=head_dim, quant=quant, pairs=pairs)
    return AttentionPlan(
        prefill=table.launch("prefill", d=head_dim, quant=quant, length=length),
        decode=decode.launch,
        programs=decode.programs,
        max_decode=1 if decode.programs else 0,
        direct=decode.direct,
        # Gluon has no interpreter
        hopper=table.launch(HOPPER) if HOPPER in table.rules and not active() else None,
    )


def attention(
    q: Tensor,
    kv: LayerKV,
    sequences: Sequences,
    shape: HeadShape,
    plan: AttentionPlan,
    *,
    sinks: Tensor | None = None,
    joins: Tensor | None = None,
) -> Tensor:
    """Causal paged attention: q [T, Hq D] (rows may be strided) to [T, Hq D].

    `joins` are int32 counters at 0, at least S Hkv, that a split decode leaves at 0; None: made
    here.
    """
    out = torch.empty(q.shape[0], shape.num_heads * shape.head_dim, dtype=q.dtype, device=q.device)
    if q.shape[0] == 0:
        return out
    if sequences.has_decodes:
        _decode(q, kv, sequences, shape, plan, sinks, out, joins)
    if sequences.has_prefills:
        if plan.hopper is not None and serves_hopper(q, kv, shape, sinks):
            _prefill_hopper(q, kv, sequences, shape, plan, out)
        else:
            _prefill(q, kv, sequences, shape, plan, sinks, out)
    return out


def serves_hopper(q: Tensor, kv: LayerKV, shape: HeadShape, sinks: Tensor | None) -> bool:
    """Whether `attention_hopper` computes this: 16-bit heads of 128 in blocks of 64 or more, no
    window, softcap or sinks.
    """
    plain = sinks is None and not shape.window and not shape.softcap
    stored = kv.data.dtype == q.dtype and q.dtype in (torch.bfloat16, torch.float16)
    packed = shape.num_heads // shape.num_kv_heads <= HOPPER_ROWS
    return plain and stored and packed and shape.head_dim == 128 and kv.block_size % 64 == 0


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
        GROUPED=plan.prefill.grouped and kv.scales is not None,
        **plan.prefill.options,
    )


def _prefill_hopper(
    q: Tensor,
    kv: LayerKV,
    sequences: Sequences,
    shape: HeadShape,
    plan: AttentionPlan,
    out: Tensor,
) -> None:
    # Gluon is loaded where its kernels run
    from halogen_triton import attention_hopper

    assert plan.hopper is not None
    tokens = HOPPER_ROWS * shape.num_kv_heads // shape.num_heads
    num = len(sequences.seq_lens)
    grid = (triton.cdiv(sequences.num_tokens, tokens) + num, shape.num_kv_heads)
    attention_hopper.prefill[grid](
        q,
        attention_hopper.boxes(kv.data),
        sequences.tables,
        sequences.seq_lens,
        sequences.starts,
        out,
        shape.scale,
        num,
        sequences.tables.stride(0),
        q.stride(0),
        HQ=shape.num_heads,
        HKV=shape.num_kv_heads,
        PAGE=kv.block_size,
        S_PAD=max(2, triton.next_power_of_2(num)),
        MAX_DECODE=plan.max_decode,
        STAGES=plan.hopper.stages,
        num_warps=4,
    )


def _decode(
    q: Tensor,
    kv: LayerKV,
    sequences: Sequences,
    shape: HeadShape,
    plan: AttentionPlan,
    sinks: Tensor | None,
    out: Tensor,
    joins: Tensor | None,
) -> None:
    group = shape.num_heads // shape.num_kv_heads
    constants = _shape_constants(sequences, shape, plan)
    rows = triton.next_power_of_2(group * plan.max_decode)
    num = len(sequences.seq_lens)
    pairs = num * shape.num_kv_heads
    programs, partial, lse = pairs, out, out
    split = sequences.flash or not plan.direct
    if split:
        programs = plan.split(pairs)
        parts = programs * 2 * rows
        partial = torch.empty(parts, constants["D_PAD"], dtype=torch.float32, device=q.device)
        lse = torch.empty(parts, dtype=torch.float32, device=q.device)
    if not split:
        joins = sequences.seq_lens
    elif joins is None or len(joins) < pairs:
        joins = torch.zeros(pairs, dtype=torch.int32, device=q.device)
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
        joins,
        shape.scale,
        shape.softcap,
        num,
        sequences.tables.stride(0),
        q.stride(0),
        **constants,
        PAGE=kv.block_size,
        BM=max(16, rows),
        BN=plan.decode.block_n,
        ROWS=rows,
        PARTS=0 if plan.decode.in_turn else plan.decode.block_m or 4,
        SINGLE=sequences.single,
        SOFTCAP=shape.softcap > 0,
        SINKS=sinks is not None,
        STORE=kv.store,
        DIRECT=not split,
        UNMASKED=plan.decode.unmasked,
        LAZY=plan.decode.lazy,
        GROUPED=plan.decode.grouped and kv.scales is not None,
        PDL=plan.decode.pdl,
        **plan.decode.options,
    )
