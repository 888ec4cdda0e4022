"""Every op of the seam in plain torch, on whatever device the tensors live."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from halogen_core.errors import UnsupportedOp
from halogen_core.spi.memory import KVCache
from halogen_core.spi.operations import Activation, AttentionSpec, MoESpec, PackedWeight
from halogen_core.spi.step import Sampled, StepMeta
from halogen_core.torch_backend import sampling
from halogen_core.torch_backend.attention import attend, kv_rows
from halogen_core.torch_backend.kv import encode, torch_kv
from halogen_core.torch_backend.moe import apply_experts, route
from halogen_core.torch_backend.rope import rope_tables, rotate
from halogen_core.torch_backend.signatures import refuse_uneven_heads
from halogen_core.torch_backend.step import torch_meta, upload_arrays
from halogen_core.torch_backend.weights import StoredRows

Weight = PackedWeight[Tensor]

_SLAB = 1 << 22
"""Elements of an output matrix that are converted at once."""


class TorchOps:
    """`spi.Ops` over `torch.Tensor`; subclass and override what the device accelerates.

    Activations are of `dtype`; inputs of another float dtype are converted on entry.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def embed(self, token_ids: Tensor, table: Weight, *, scale: float = 1.0) -> Tensor:
        rows = table.payload
        if isinstance(rows, StoredRows):
            found = rows.look_up(token_ids)
        else:
            found = rows.index_select(0, token_ids)
        return (found if scale == 1.0 else found * scale).to(self.dtype)

    def rms_norm(self, x: Tensor, weight: Weight, *, eps: float) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight.payload, eps).to(self.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Weight, *, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = self.add(x, residual)
        return self.rms_norm(total, weight, eps=eps), total

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self._activation(x).add_(self._activation(y))

    def linear(self, x: Tensor, weight: Weight, *, bias: Weight | None = None) -> Tensor:
        return self.matmul(self._activation(x), weight.payload, bias.payload if bias else None)

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """X [T, K] times weight [N, K] transposed: the one dense product all ops are made of."""
        return F.linear(x, weight, bias)

    def matmul_f32(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product with a float32 result, not rounded to `dtype` on the way."""
        if weight.dtype is torch.float32:
            return self.matmul(x, weight)
        # slab by slab, so that no second float32 table is held
        rows, step = weight.shape[0], max(1, _SLAB // weight.shape[1])
        slabs = (weight[start : start + step].float() for start in range(0, rows, step))
        return torch.cat([self.matmul(x.float(), slab) for slab in slabs], dim=1)

    def qkv_rope_store(
        self,
        qkv: Tensor,
        kv: KVCache,
        layer: int,
        meta: StepMeta[Tensor],
        spec: AttentionSpec,
        *,
        q_norm: Weight | None = None,
        k_norm: Weight | None = None,
    ) -> Tensor:
        step, tokens = torch_meta(meta), len(qkv)
        refuse_uneven_heads(spec)
        query_heads, kv_heads = spec.num_heads, spec.num_kv_heads
        heads = qkv.view(tokens, query_heads + 2 * kv_heads, spec.head_dim)
        turned = heads[:, : query_heads + kv_heads]
        if q_norm is not None or k_norm is not None:
            turned = self._norm_heads(turned, query_heads, q_norm, k_norm, spec.norm_eps)
        if spec.rope is not None:
            rope = spec.rope
            tables = step.once(
                ("rope", rope), lambda: rope_tables(step.positions, rope, torch.float32)
            )
            turned = rotate(turned.float(), tables, rope).to(self.dtype)
        rows = step.once(
            ("kv rows", id(kv)),
            lambda: upload_arrays([kv_rows(kv, step.host)], qkv.device)[0],
        )
        both = torch.cat((turned[:, query_heads:], heads[:, query_heads + kv_heads :]), dim=1)
        payload = torch_kv(kv)
        stored = encode(both, payload.dtype).flatten(0, 1)
        payload.layers[layer].index_copy_(0, rows, stored)
        return turned[:, :query_heads].flatten(1)

    def attention(
        self,
        q: Tensor,
        kv: KVCache,
        layer: int,
        meta: StepMeta[Tensor],
        spec: AttentionSpec,
        *,
        sinks: Weight | None = None,
    ) -> Tensor:
        step = torch_meta(meta)
        refuse_uneven_heads(spec)
        return attend(self._activation(q), kv, layer, step, spec, sinks.payload if sinks else None)

    def gated_act(self, gate_up: Tensor, kind: Activation) -> Tensor:
        gate, up = self._activation(gate_up).chunk(2, dim=-1)
        if kind is Activation.SILU:
            return self.silu(gate).mul_(up)
        if kind is Activation.GELU_TANH:
            return self.gelu_tanh(gate).mul_(up)
        if kind is Activation.SWIGLU_OAI:
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            return gate * self.sigmoid(gate * 1.702) * (up + 1)
        raise UnsupportedOp(f"activation is `{kind}`; known are {', '.join(Activation)}")

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def mlp(self, x: Tensor, gate_up: Weight, down: Weight, kind: Activation) -> Tensor:
        return self.linear(self.gated_act(self.linear(x, gate_up), kind), down)

    def moe(
        self, x: Tensor, router: Weight, gate_up: Weight, down: Weight, spec: MoESpec
    ) -> Tensor:
        x = self._activation(x)
        experts, weights = route(self.matmul(x, router.payload), spec)

        def expert(index: int, rows: Tensor) -> Tensor:
            inner = self.gated_act(self.matmul(rows, gate_up.payload[index]), spec.activation)
            return self.matmul(inner, down.payload[index])

        return apply_experts(x, experts, weights, spec.num_experts, expert)

    def select_rows(self, x: Tensor, meta: StepMeta[Tensor]) -> Tensor:
        return self._activation(x).index_select(0, meta.logit_rows)

    def logits(
        self, x: Tensor, weight: Weight, *, scale: float = 1.0, softcap: float | None = None
    ) -> Tensor:
        values = self.matmul_f32(self._activation(x), weight.payload)
        if scale != 1.0:
            values = values.mul_(scale)
        return values if softcap is None else values.div_(softcap).tanh_().mul_(softcap)

    def sample(self, logits: Tensor, meta: StepMeta[Tensor]) -> Sampled[Tensor]:
        return sampling.sample(logits, meta.host.sampling, meta.sampling)

    def _activation(self, x: Tensor) -> Tensor:
        return x if x.dtype is self.dtype else x.to(self.dtype)

    def _norm_heads(
        self,
        heads: Tensor,
        query_heads: int,
        q_norm: Weight | None,
        k_norm: Weight | None,
        eps: float,
    ) -> Tensor:
        """RMSNorm of each head of [T, Hq + Hkv, D] by the weight of its kind, where it has one."""
        kinds = heads.float().split_with_sizes((query_heads, heads.shape[1] - query_heads), 1)
        shape = (heads.shape[-1],)
        return torch.cat(
            [
                part if weight is None else F.rms_norm(part, shape, weight.payload, eps)
                for part, weight in zip(kinds, (q_norm, k_norm), strict=True)
            ],
            dim=1,
        )
