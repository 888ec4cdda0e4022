"""One function per torch_npu operator that we use, with the argument pattern that it wants.

Keyword names follow torch_npu 2.13: the first argument of many is `input`, not `self` as the
vendor's yaml says. Lengths are host lists; a mask value of True means hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from halogen_ascend import constraints

FRACTAL_NZ, ND = 29, 2
"""The vendor's numbers of the two formats."""
MASK_SIZE = 2048
CAUSAL, BAND = 3, 4


def _npu() -> Any:
    return torch.ops.npu


def _tensor(value: Any) -> Tensor:
    """One result, typed: what comes out of the dispatcher is `Any`."""
    assert isinstance(value, Tensor)
    return value


@attrs.frozen(kw_only=True, eq=False)
class PagedCall:
    """A paged attention call: cache views [N, B, Hkv * D], host length lists."""

    query: Tensor
    """[T, Hq, D]"""
    key: Tensor
    value: Tensor
    block_table: Tensor
    """int32 [S, M], no negative entries"""
    query_ends: Sequence[int]
    kv_lengths: Sequence[int]
    num_heads: int
    num_kv_heads: int
    scale: float
    block_size: int
    mask: Tensor
    window: int | None = None
    sinks: Tensor | None = None


def paged_attention(call: PagedCall) -> Tensor:
    """Fused attention, TND: [T, Hq, D]. Sinks need the second version of the operator."""
    positional, named = _arguments(call)
    attend, _ = _operators(call)
    return _tensor(attend(*positional, **named)[0])


def paged_attention_workspace(call: PagedCall) -> Tensor:
    """The largest workspace that the call may need, asked once per captured bucket."""
    positional, named = _arguments(call)
    _, workspace = _operators(call)
    return _tensor(workspace(*positional, **named))


def paged_attention_into(call: PagedCall, workspace: Tensor, out: tuple[Tensor, Tensor]) -> None:
    """The same into given memory, as captured steps want it; out is (attention, lse)."""
    positional, named = _arguments(call)
    attend, _ = _operators(call)
    attend.out(*positional, **named, workspace=workspace, out=list(out))


def _operators(call: PagedCall) -> tuple[Any, Any]:
    """The operator, and the one that tells its workspace."""
    npu = _npu()
    if call.sinks is None:
        return (
            npu.npu_fused_infer_attention_score,
            npu._npu_fused_infer_attention_score_get_max_workspace,
        )
    return (
        npu.npu_fused_infer_attention_score_v2,
        npu._npu_fused_infer_attention_score_v2_get_max_workspace,
    )


def _arguments(call: PagedCall) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    constraints.check_block_size(call.block_size)
    constraints.check_lengths(call.query_ends, call.kv_lengths, call.query.shape[0])
    named: dict[str, Any] = {
        "atten_mask": call.mask,
        "block_table": call.block_table,
        "num_key_value_heads": call.num_kv_heads,
        "input_layout": "TND",
        "block_size": call.block_size,
        "sparse_mode": CAUSAL if call.window is None else BAND,
    }
    if call.window is not None:
        # in band mode a query sees `pre_tokens` tokens before its own
        named |= {"pre_tokens": call.window - 1, "next_tokens": 0}
    ends, lengths = list(call.query_ends), list(call.kv_lengths)
    if call.sinks is None:
        named |= {"actual_seq_lengths": ends, "actual_seq_lengths_kv": lengths}
        named |= {"num_heads": call.num_heads, "scale": call.scale}
    else:
        named |= {"actual_seq_qlen": ends, "actual_seq_kvlen": lengths}
        named |= {"num_query_heads": call.num_heads, "softmax_scale": call.scale}
        named |= {"learnable_sink": call.sinks}
    return (call.query, call.key, call.value), named


def causal_mask(device: torch.device) -> Tensor:
    """The fixed mask that sparse modes 3 and 4 want: bool [2048, 2048], True above the diagonal."""
    ones = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device)
    return torch.triu(ones, diagonal=1)


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Write key and value [T, Hkv, D] to slots [T] of caches [N, B, Hkv, D], in place."""
    # the operator's own default mode is the NZ cache
    _npu().npu_scatter_pa_kv_cache(key, value, key_cache, value_cache, slots, cache_mode="Norm")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis."""
    normed, _ = _npu().npu_rms_norm(x, weight, eps)
    return _tensor(normed)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Norm of the sum, and the sum."""
    normed, _, total = _npu().npu_add_rms_norm(x, residual, weight, eps)
    return normed, total


def rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Rotate x [1, T, H, d] by cos, sin [1, T, 1, d]; mode `half` or `interleave`."""
    return _tensor(_npu().npu_rotary_mul(x, cos, sin, rotary_mode=mode))


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, gate first."""
    return _tensor(_npu().npu_swiglu(gate_up, dim=-1))


def quantised_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """W8A8 with a scale per token: x [T, K], weight int8 [K, N], scale [N]."""
    constraints.check_quant_matmul(scale.shape[0], x.shape[-1])
    rows, row_scale = _npu().npu_dynamic_quant(x)
    # without output_dtype the operator answers int8
    return _tensor(
        _npu().npu_quant_matmul(
            rows, weight, scale, pertoken_scale=row_scale, bias=bias, output_dtype=_code(x.dtype)
        )
    )


def weight_quantised_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """W8A16: x [T, K], weight int8 [K, N], scale [N] in x's dtype."""
    return _tensor(_npu().npu_weight_quant_batchmatmul(x, weight, antiquant_scale=scale, bias=bias))


def to_nz(weight: Tensor) -> Tensor:
    """Cast to FRACTAL_NZ; from here on no view, slice or pad of it."""
    constraints.check_nz_allowed(str(weight.dtype).removeprefix("torch."))
    return _tensor(_npu().npu_format_cast(weight, FRACTAL_NZ))


def to_nd(weight: Tensor) -> Tensor:
    """Back to rows and columns."""
    return _tensor(_npu().npu_format_cast(weight, ND))


def gate_top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Softmax over experts, then the k largest: weights [T, k], experts int32 [T, k]."""
    weights, experts, _ = _npu().npu_moe_gating_top_k_softmax(logits, k=k)
    return weights, experts


def sort_by_expert(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [T k, H] in order of expert, where each (token, choice) went, counts int64 [E]."""
    rows, where, counts, _ = _npu().npu_moe_init_routing_v2(
        x,
        experts,
        active_num=experts.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts],
        quant_mode=-1,
    )
    return rows, where, counts.to(torch.int64)


def grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Rows in order of expert by weights [E, K, N]; counts [E] rows each."""
    return _tensor(
        _npu().npu_grouped_matmul(
            [rows],
            [weights],
            group_list=counts,
            split_item=2,
            group_type=0,
            group_list_type=1,
        )[0]
    )


def _code(dtype: torch.dtype) -> int:
    """Torch's scalar type number, which is what the operators take."""
    return {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}[dtype]
