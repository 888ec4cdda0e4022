"""Ops on the real device; what the operators lack stays plain torch and is counted as fallback."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from halogen_ascend.constraints import attention_denials
from halogen_ascend.npu import calls
from halogen_ascend.npu.composed import composed_attention
from halogen_ascend.npu.graph import TaskList
from halogen_ascend.npu.kv import NpuKV, npu_kv
from halogen_ascend.npu.weights import Int8Weight
from halogen_core.spi import (
    Activation,
    AttentionSpec,
    KVCache,
    MoESpec,
    PackedWeight,
    RopeSpec,
    RopeStyle,
    StepBatch,
    StepMeta,
    TorchOps,
)

Weight = PackedWeight[Tensor]
Meta = StepMeta[Tensor]


class NpuOps(TorchOps):
    """`spi.Ops` over NPU tensors; `composed` counts attention calls that could not be fused."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.composed = 0
        self.tasks: TaskList | None = None
        """Set while a step is captured: calls with host arguments go through it."""
        self._mask: Tensor | None = None
        self._pairs: dict[RopeSpec, Tensor] = {}

    def rms_norm(self, x: Tensor, weight: Weight, *, eps: float) -> Tensor:
        return calls.rms_norm(x.to(self.dtype), weight.payload, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Weight, *, eps: float
    ) -> tuple[Tensor, Tensor]:
        return calls.add_rms_norm(x.to(self.dtype), residual.to(self.dtype), weight.payload, eps)

    def gated_act(self, gate_up: Tensor, kind: Activation) -> Tensor:
        if kind is Activation.SILU:
            return calls.swiglu(gate_up.to(self.dtype))
        return super().gated_act(gate_up, kind)

    def linear(self, x: Tensor, weight: Weight, *, bias: Weight | None = None) -> Tensor:
        payload = weight.payload
        if isinstance(payload, Int8Weight):
            return payload.apply(x.to(self.dtype), bias.payload if bias else None)
        return super().linear(x, weight, bias=bias)

    def qkv_rope_store(
        self,
        qkv: Tensor,
        kv: KVCache,
        layer: int,
        meta: Meta,
        spec: AttentionSpec,
        *,
        q_norm: Weight | None = None,
        k_norm: Weight | None = None,
    ) -> Tensor:
        heads = qkv.to(self.dtype).view(len(qkv), -1, spec.head_dim)
        q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        if q_norm is not None:
            q = calls.rms_norm(q.contiguous(), q_norm.payload, spec.norm_eps)
        if k_norm is not None:
            k = calls.rms_norm(k.contiguous(), k_norm.payload, spec.norm_eps)
        if spec.rope is not None:
            cos, sin = self._tables(meta, spec.rope)
            q, k = (_rotate(part, cos, sin, spec.rope) for part in (q, k))
        cache = npu_kv(kv)
        calls.store_kv(
            k.contiguous(),
            v.contiguous(),
            cache.keys[layer],
            cache.values[layer],
            cache.slots(meta),
        )
        return q.reshape(len(qkv), -1)

    def attention(
        self,
        q: Tensor,
        kv: KVCache,
        layer: int,
        meta: Meta,
        spec: AttentionSpec,
        *,
        sinks: Weight | None = None,
    ) -> Tensor:
        cache, query = npu_kv(kv), q.to(self.dtype).view(len(q), -1, spec.head_dim)
        extra = sinks.payload if sinks else None
        if attention_denials(spec):
            self.composed += 1
            return composed_attention(query, cache, layer, meta, spec, extra).flatten(1)
        if self.tasks is not None:
            made = self.tasks.launch(
                lambda host: self._paged(query, cache, layer, meta, spec, extra, host), meta.host
            )
        else:
            made = calls.paged_attention(
                self._paged(query, cache, layer, meta, spec, extra, meta.host)
            )
        return made.reshape(len(q), -1)

    def moe(
        self, x: Tensor, router: Weight, gate_up: Weight, down: Weight, spec: MoESpec
    ) -> Tensor:
        x = x.to(self.dtype)
        logits = self.matmul(x, router.payload)
        if spec.gating == "softmax":
            weights, experts = calls.gate_top_k(logits, spec.top_k)
        else:
            weights, chosen = logits.float().sigmoid().topk(spec.top_k)
            experts = chosen.int()
        if spec.normalize_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        rows, where, counts = calls.sort_by_expert(x, experts, spec.num_experts)
        inner = self.gated_act(calls.grouped_linear(rows, gate_up.payload, counts), spec.activation)
        made = calls.grouped_linear(inner, down.payload, counts)
        parts = made.index_select(0, where.long()).view(len(x), spec.top_k, -1)
        scaled = parts * (weights * spec.weight_scale).unsqueeze(-1).to(parts.dtype)
        return scaled.sum(1)

    def constant(self, values: tuple[float, ...], device: torch.device) -> Tensor:
        """Host values on the device, float32; kept by the caller, uploads are slow."""
        return torch.tensor(values, dtype=torch.float32, device=device)

    def _tables(self, meta: Meta, rope: RopeSpec) -> tuple[Tensor, Tensor]:
        """Cos and sin [1, T, 1, dim] of the step's positions, made once per step."""
        if (pairs := self._pairs.get(rope)) is None:
            pairs = self._pairs[rope] = self.constant(rope.inv_freq, meta.positions.device)

        def make() -> tuple[Tensor, Tensor]:
            angles = meta.positions.float().unsqueeze(1) * pairs
            if rope.style is RopeStyle.NEOX:
                angles = torch.cat((angles, angles), 1)
            else:
                angles = torch.stack((angles, angles), 2).flatten(1)
            whole = angles.unsqueeze(0).unsqueeze(2)
            cos, sin = whole.cos() * rope.attention_factor, whole.sin() * rope.attention_factor
            return cos.to(self.dtype), sin.to(self.dtype)

        return cast("tuple[Tensor, Tensor]", cast("Any", meta).once(("npu rope", rope), make))

    def _paged(
        self,
        query: Tensor,
        cache: NpuKV,
        layer: int,
        meta: Meta,
        spec: AttentionSpec,
        sinks: Tensor | None,
        host: StepBatch,
    ) -> calls.PagedCall:
        if self._mask is None:
            self._mask = calls.causal_mask(query.device)
        keys, values = cache.paged(layer)
        return calls.PagedCall(
            query=query,
            key=keys,
            value=values,
            block_table=cache.tables(meta),
            query_ends=host.query_start_loc[1:].tolist(),
            kv_lengths=host.seq_lens.tolist(),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            scale=spec.scale,
            block_size=cache.block_size,
            mask=self._mask,
            window=spec.window,
            sinks=sinks,
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: RopeSpec) -> Tensor:
    mode = "half" if rope.style is RopeStyle.NEOX else "interleave"
    part = x.narrow(-1, 0, rope.dim).contiguous().unsqueeze(0)
    turned = calls.rotary(part, cos, sin, mode).squeeze(0)
    if rope.dim == x.shape[-1]:
        return turned
    return torch.cat((turned, x.narrow(-1, rope.dim, x.shape[-1] - rope.dim)), -1)
