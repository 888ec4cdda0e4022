"""`spi.Ops` over the Triton kernels; what has no kernel here stays plain torch."""

from __future__ import annotations

from collections import Counter

import attrs
import torch
from torch import Tensor

from halogen_core.spi import (
    OPS,
    Activation,
    AttentionSpec,
    KVCache,
    MoESpec,
    PackedWeight,
    RopeSpec,
    RopeStyle,
    Sampled,
    StepMeta,
    TorchOps,
    UnsupportedOp,
)
from halogen_triton.attention import (
    AttentionPlan,
    HeadShape,
    Sequences,
    attention,
    attention_plan,
)
from halogen_triton.dense import Normed, Product, dense, dense_rule, to_heads, to_stream
from halogen_triton.int8 import Int8, RoundedRows, gated_rounded, rms_norm_rounded
from halogen_triton.kv import payload
from halogen_triton.launch import Tuning
from halogen_triton.linear import embedding_rows, expert_linear, gates, linear
from halogen_triton.moe import expert_rows, route
from halogen_triton.planes import Planes
from halogen_triton.pointwise import (
    ACTIVATIONS,
    Rotation,
    gated_act,
    qkv_rope_store,
    rms_norm,
    rotation,
)
from halogen_triton.sampling import DrawTensors, draw, draw_arrays, draw_tensors, is_plain
from halogen_triton.tiles import Tiles

Weight = PackedWeight[Tensor]
Rows = Tensor | Normed | Product | RoundedRows
_JOINS = 1 << 19
"""Counters of kernels whose last program joins what others left; each leaves them at 0."""
_FUSED = frozenset(OPS) - {"attention", "sample"}


class TritonOps(TorchOps):
    """Ops for one device; `flash_threshold` may be changed while running.

    In decode steps of dense weights a `linear` or a norm is only made by the op after it, with
    which it may share a kernel (`halogen_triton.dense`); `settled` makes it at once. In models with
    W8A8 weights norms and gated activations round their rows themselves (`halogen_triton.int8`).
    """

    def __init__(self, dtype: torch.dtype, tuning: Tuning, device: torch.device) -> None:
        super().__init__(dtype)
        self.tuning = tuning
        self.device = device
        self.flash_threshold = 256
        """Context in tokens up to which a decoding sequence is not split over programs."""
        self._rotations: dict[RopeSpec, Rotation] = {}
        self._joins = torch.zeros(_JOINS, dtype=torch.int32, device=device)
        self.attention_calls: Counter[str] = Counter()
        """Calls by path: `direct`, `flash` (split over programs), `prefill`."""
        self.rounds = False
        """W8A8 weights were packed, so norms leave their rows in both forms."""

    def embed(self, token_ids: Tensor, table: Weight, *, scale: float = 1.0) -> Tensor:
        if isinstance(table.payload, Planes | Tiles):
            return embedding_rows(token_ids, table.payload, self.dtype, scale=scale)
        return super().embed(token_ids, table, scale=scale)

    def settled(self, x: Rows) -> Tensor:
        """What an op left for the next one to make."""
        if isinstance(x, Normed):
            return x.settled(pdl=self.tuning.pdl)
        if isinstance(x, Product):
            return dense(x.x, x.weight, x.rule, bias=x.bias, joins=self._joins)
        if isinstance(x, RoundedRows):
            assert x.exact is not None
            return x.exact
        return x

    def rms_norm(self, x: Rows, weight: Weight, *, eps: float) -> Rows:  # type: ignore[override]
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(  # type: ignore[override]
        self, x: Rows, residual: Tensor, weight: Weight, *, eps: float
    ) -> tuple[Rows, Tensor]:
        residual = self._activation(residual).contiguous()
        # times a norm's weight a row may exceed float16
        if isinstance(x, Product) and self.dtype is not torch.float16:
            x = attrs.evolve(x, x=self.settled(x.x))
            normed = to_stream(x, residual, weight.payload, eps)
            return normed, normed.stream
        return self._norm(x, residual, weight, eps)

    def _norm(
        self, x: Rows, residual: Tensor | None, weight: Weight, eps: float
    ) -> tuple[Rows, Tensor]:
        norm = rms_norm_rounded if self.rounds and self._fuses else rms_norm
        return norm(self._rows(x), weight.payload, eps, residual=residual, pdl=self.tuning.pdl)

    def linear(  # type: ignore[override]
        self, x: Rows, weight: Weight, *, bias: Weight | None = None
    ) -> Rows:
        own = None if bias is None else bias.payload
        rule = dense_rule(weight.payload, self.tuning, x.shape[0], weight.shape[0])
        if rule is not None and not rule.ring and self._fuses:
            x = x if isinstance(x, Normed) else self._rows(x)
            return Product(x, weight.payload, own, rule)
        rounded = isinstance(x, RoundedRows) and isinstance(weight.payload, Int8)
        rows = x if rounded else self._rows(x)
        return linear(rows, weight.payload, self.tuning, bias=own, joins=self._joins)

    @property
    def _fuses(self) -> bool:
        """Whoever serves an op in our place (a kernel pack, a recording) expects tensors."""
        return self.__dict__.keys().isdisjoint(_FUSED)

    def qkv_rope_store(
        self,
        qkv: Rows,
        kv: KVCache,
        layer: int,
        meta: StepMeta[Tensor],
        spec: AttentionSpec,
        *,
        q_norm: Weight | None = None,
        k_norm: Weight | None = None,
    ) -> Tensor:
        cache, heads = payload(kv).layers[layer], _heads(spec)
        rope = None if spec.rope is None else self._rotation(spec.rope)
        plain = q_norm is None and k_norm is None and cache.store == 0
        if isinstance(qkv, Product) and plain and rope is not None and rope.dim == spec.head_dim:
            rows, n = qkv.shape
            rule = dense_rule(qkv.weight, self.tuning, rows, n // 2, pairs=2)
            if rule is not None:
                at = meta.positions, meta.slot_mapping
                return to_heads(qkv, rule, cache, *at, heads, rope)
        return qkv_rope_store(
            self._rows(qkv),
            cache,
            meta.positions,
            meta.slot_mapping,
            heads,
            rope,
            q_norm=None if q_norm is None else q_norm.payload,
            k_norm=None if k_norm is None else k_norm.payload,
            eps=spec.norm_eps,
            pdl=self.tuning.pdl,
        )

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
        plan = self.attention_plan(
            spec.head_dim,
            quantised=payload(kv).scales is not None,
            pairs=meta.host.num_sequences * spec.num_kv_heads,
            length=meta.host.max_seq_len,
        )
        sequences = self._sequences(meta, plan.max_decode)
        if sequences.has_decodes:
            self.attention_calls["flash" if sequences.flash else "direct"] += 1
        if sequences.has_prefills:
            self.attention_calls["prefill"] += 1
        return attention(
            self._rows(q),
            payload(kv).layers[layer],
            sequences,
            _heads(spec),
            plan,
            sinks=None if sinks is None else sinks.payload,
            joins=self._joins,
        )

    def gated_act(self, gate_up: Rows, kind: Activation) -> Tensor:
        return gated_act(self._rows(gate_up), ACTIVATIONS[kind], pdl=self.tuning.pdl)

    def mlp(  # type: ignore[override]
        self, x: Rows, gate_up: Weight, down: Weight, kind: Activation
    ) -> Rows:
        weight, act = gate_up.payload, ACTIVATIONS[kind]
        rule = dense_rule(weight, self.tuning, x.shape[0], gate_up.shape[0] // 2, pairs=1)
        if rule is not None and isinstance(x, Normed):
            inner = dense(x, weight, rule, activation=act, joins=self._joins)
        elif gates(x.shape[0], weight, self.tuning):
            rows = self._rows(x)
            inner = linear(rows, weight, self.tuning, activation=act, joins=self._joins)
        elif isinstance(down.payload, Int8) and self._fuses:
            inner = gated_rounded(self._rows(self.linear(x, gate_up)), act, pdl=self.tuning.pdl)
        else:
            return super().mlp(self._rows(x), gate_up, down, kind)
        return self.linear(inner, down)

    def moe(self, x: Rows, router: Weight, gate_up: Weight, down: Weight, spec: MoESpec) -> Tensor:
        x = self._rows(x)
        if x.shape[0] == 0:
            return x
        experts, weights = route(torch.nn.functional.linear(x, router.payload), spec)
        rows = expert_rows(experts, spec.num_experts)
        inner = expert_linear(x, gate_up.payload, rows, self.tuning)
        inner = gated_act(inner, ACTIVATIONS[spec.activation], pdl=self.tuning.pdl)
        out = expert_linear(inner, down.payload, attrs.evolve(rows, top_k=1), self.tuning)
        ranked = out.view(*experts.shape, -1).float() * weights.unsqueeze(-1)
        return ranked.sum(1).to(self.dtype)

    def logits(
        self, x: Rows, weight: Weight, *, scale: float = 1.0, softcap: float | None = None
    ) -> Tensor:
        rule = dense_rule(weight.payload, self.tuning, x.shape[0], weight.shape[0])
        wide = torch.float32
        if rule is not None and isinstance(x, Normed):
            values = dense(x, weight.payload, rule, out_dtype=wide, joins=self._joins)
        else:
            rows = self._rows(x)
            values = linear(rows, weight.payload, self.tuning, out_dtype=wide, joins=self._joins)
        if scale != 1.0:
            values = values.mul_(scale)
        return values if softcap is None else values.div_(softcap).tanh_().mul_(softcap)

    def sample(self, logits: Tensor, meta: StepMeta[Tensor]) -> Sampled[Tensor]:
        fields = meta.sampling
        if not isinstance(fields, DrawTensors):
            batch = meta.host.sampling
            if not is_plain(batch):
                return super().sample(logits, meta)
            arrays = draw_arrays(batch).items()
            fields = draw_tensors({n: torch.from_numpy(a).to(self.device) for n, a in arrays})
        return Sampled(token_ids=draw(logits, fields, joins=self._joins, pdl=self.tuning.pdl))

    def attention_plan(
        self, head_dim: int, *, quantised: bool, pairs: int = 0, length: int = 0
    ) -> AttentionPlan:
        """Launch shapes of attention for a head dim; `quantised` KV has scales.

        `pairs` are (sequence, KV head) pairs, `length` that of the longest sequence.
        """
        return attention_plan(
            self.tuning, head_dim, quantised=quantised, pairs=pairs, length=length
        )

    def _activation(self, x: Rows) -> Tensor:
        return super()._activation(self.settled(x))

    def _rows(self, x: Rows) -> Tensor:
        x = self._activation(x)
        return x if x.stride(-1) == 1 else x.contiguous()

    def _rotation(self, rope: RopeSpec) -> Rotation:
        if rope not in self._rotations:
            self._rotations[rope] = rotation(
                rope.inv_freq,
                rope.dim,
                neox=rope.style is RopeStyle.NEOX,
                factor=rope.attention_factor,
                device=self.device,
            )
        return self._rotations[rope]

    def _sequences(self, meta: StepMeta[Tensor], max_decode: int) -> Sequences:
        host = meta.host
        counts = host.query_start_loc[1:] - host.query_start_loc[:-1]
        return Sequences(
            starts=meta.query_start_loc,
            seq_lens=meta.seq_lens,
            tables=meta.block_tables,
            num_tokens=host.num_tokens,
            max_query_len=int(counts.max(initial=0)),
            has_decodes=bool(((counts > 0) & (counts <= max_decode)).any()),
            has_prefills=bool((counts > max_decode).any()),
            flash=host.max_seq_len > self.flash_threshold,
        )


def _heads(spec: AttentionSpec) -> HeadShape:
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedOp(
            f"{spec.num_heads} query heads do not divide over {spec.num_kv_heads} kv heads"
        )
    return HeadShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        window=spec.window or 0,
        softcap=spec.softcap or 0.0,
    )
