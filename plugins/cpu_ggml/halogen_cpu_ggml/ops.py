"""The ops in ggml's own: any weight type ggml knows, no kernels of ours. Also their fallback."""

from __future__ import annotations

import attrs

from halogen_core.spi import (
    Activation,
    AttentionSpec,
    KVCache,
    MoESpec,
    PackedWeight,
    Sampled,
    StepMeta,
    UnsupportedOp,
)
from halogen_cpu_ggml import composed, sampling
from halogen_cpu_ggml.inputs import StepInputs
from halogen_cpu_ggml.recorder import (
    Recorder,
    columns,
    empty_like,
    in_order,
    joined,
    weight_tensor,
)
from halogen_cpu_ggml.tape import Node, Tape, host_node, view_f32
from halogen_cpu_ggml.weights import Weight

Meta = StepMeta[Node]
Packed = PackedWeight[Node]


def step_inputs(meta: Meta) -> StepInputs:
    """The backend's own form of a step, made by `upload_step` or `capture`."""
    inputs = meta.sampling
    if not isinstance(inputs, StepInputs):
        raise TypeError("`meta` was not made by this backend's `upload_step`")
    return inputs


@attrs.define(eq=False)
class GgmlOps:
    """`Ops` over graph nodes."""

    recorder: Recorder

    # -- rows in, rows out

    def embed(self, token_ids: Node, table: Packed, *, scale: float = 1.0) -> Node:
        t, h = token_ids.shape[0], table.shape[-1]
        if t == 0:
            return empty_like((0, h))
        with self.recorder.tape() as tape:
            part = payload(table).parts[0]
            out = tape.op("get_rows", weight_tensor(tape, part), token_ids, shape=(t, h))
            if scale != 1.0:
                out = tape.op("scale", out, scale, shape=(t, h))
            out.rows = token_ids.rows
        return out

    def rms_norm(self, x: Node, weight: Packed, *, eps: float) -> Node:
        if x.shape[0] == 0:
            return empty_like(x.shape)
        with self.recorder.tape() as tape:
            out = composed.rms_norm(tape, joined(tape, x), vector_node(tape, weight), eps)
            out.rows = x.rows
        return out

    def add_rms_norm(
        self, x: Node, residual: Node, weight: Packed, *, eps: float
    ) -> tuple[Node, Node]:
        total = self.add(x, residual)
        return self.rms_norm(total, weight, eps=eps), total

    def add(self, x: Node, y: Node) -> Node:
        if x.shape[0] == 0:
            return empty_like(x.shape)
        with self.recorder.tape() as tape:
            out = tape.op("add", joined(tape, x), joined(tape, y), shape=x.shape)
            out.rows = x.rows
        return out

    def select_rows(self, x: Node, meta: Meta) -> Node:
        r = meta.logit_rows.shape[0]
        if r == 0:
            return empty_like((0, x.shape[1]))
        with self.recorder.tape() as tape:
            shape = (r, x.shape[1])
            out = tape.op("get_rows", joined(tape, x), meta.logit_rows, shape=shape)
            out.rows = meta.logit_rows.rows
        return out

    # -- matrices

    def linear(self, x: Node, weight: Packed, *, bias: Packed | None = None) -> Node:
        t, n = x.shape[0], weight.shape[-2]
        if t == 0:
            return empty_like((0, n))
        with self.recorder.tape() as tape:
            x = joined(tape, x)
            outs = [
                tape.op(
                    "mul_mat", weight_tensor(tape, p), in_order(tape, x, p), shape=(t, p.outputs)
                )
                for p in payload(weight).parts
            ]
            out = outs[0]
            if len(outs) > 1:
                out = Node((t, n), outs[0].dtype, tape, parts=tuple(outs), rows=x.rows)
            if bias is not None:
                whole = joined(tape, out)
                out = tape.op("add", whole, vector_node(tape, bias), shape=(t, n))
            out.rows = x.rows
            if not self.recorder.current:
                out = joined(tape, out)
        return out

    def logits(
        self, x: Node, weight: Packed, *, scale: float = 1.0, softcap: float | None = None
    ) -> Node:
        out = self.linear(x, weight)
        if out.shape[0] == 0 or (scale == 1.0 and softcap is None):
            return out
        with self.recorder.tape() as tape:
            out = composed.softcapped(tape, joined(tape, out), scale, softcap)
            out.rows = x.rows
        return out

    def gated_act(self, gate_up: Node, kind: Activation) -> Node:
        t, f = gate_up.shape[0], gate_up.shape[1] // 2
        if t == 0:
            return empty_like((0, f))
        with self.recorder.tape() as tape:
            gate, up = columns(tape, gate_up, (f, f))
            out = composed.gated(tape, gate, up, kind)
            out.rows = gate_up.rows
        return out

    def mlp(self, x: Node, gate_up: Packed, down: Packed, kind: Activation) -> Node:
        return self.linear(self.gated_act(self.linear(x, gate_up), kind), down)

    def moe(self, x: Node, router: Packed, gate_up: Packed, down: Packed, spec: MoESpec) -> Node:
        check_experts(spec, gate_up, down)
        if x.shape[0] == 0:
            return empty_like(x.shape)
        with self.recorder.tape() as tape:
            one, two = (weight_tensor(tape, payload(w).parts[0]) for w in (router, down))
            stacks = [weight_tensor(tape, p) for p in payload(gate_up).parts]
            out = composed.moe(tape, joined(tape, x), one, stacks, two, spec)
            out.rows = x.rows
        return out

    # -- attention

    def qkv_rope_store(
        self,
        qkv: Node,
        kv: KVCache,
        layer: int,
        meta: Meta,
        spec: AttentionSpec,
        *,
        q_norm: Packed | None = None,
        k_norm: Packed | None = None,
    ) -> Node:
        check_heads("qkv_rope_store", spec)
        t, width = qkv.shape[0], spec.num_heads * spec.head_dim
        if t == 0:
            return empty_like((0, width))
        with self.recorder.tape() as tape:
            step_inputs(meta).reserved_slot = kv.payload.reserved_slot
            norms = (_optional(tape, q_norm), _optional(tape, k_norm))
            out = composed.rope_store(tape, qkv, kv, layer, meta, spec, norms=norms)
            out.rows = meta.token_ids.rows
        return out

    def attention(
        self,
        q: Node,
        kv: KVCache,
        layer: int,
        meta: Meta,
        spec: AttentionSpec,
        *,
        sinks: Packed | None = None,
    ) -> Node:
        check_heads("attention", spec)
        if q.shape[0] == 0:
            return empty_like(q.shape)
        with self.recorder.tape() as tape:
            inputs = step_inputs(meta)
            sink = _optional(tape, sinks)
            out = composed.attention(tape, q, kv, layer, inputs, spec, sinks=sink)
            out.rows = q.rows
        return out

    # -- sampling

    def sample(self, logits: Node, meta: Meta) -> Sampled[Node]:
        inputs = step_inputs(meta)
        if self.recorder.current is not None and logits.shape[0] == 0:
            return Sampled(token_ids=logits)
        if self.recorder.current is not None:
            with self.recorder.tape() as tape:
                picker = sampling.AfterGraph(joined(tape, logits))
                tape.memo[sampling.PICKER] = picker
                return Sampled(token_ids=picker.logits)
        rows = inputs.sampling.num_rows
        return sampled_nodes(sampling.sample(view_f32(logits)[:rows], inputs.sampling))


def sampled_nodes(result: sampling.Choice) -> Sampled[Node]:
    """Host results as device arrays."""
    arrays = (result.token_ids, result.logprobs, result.top_ids, result.top_logprobs)
    ids, logprobs, top_ids, top = (None if a is None else host_node(a) for a in arrays)
    assert ids is not None
    return Sampled(token_ids=ids, logprobs=logprobs, top_ids=top_ids, top_logprobs=top)


def refused(op: str, why: str) -> UnsupportedOp:
    """The error for a call that `supports` denies; ggml or a kernel would not survive it."""
    return UnsupportedOp(f"`{op}` cannot run on cpu_ggml: {why}", code="HRT-1102")


def check_heads(op: str, spec: AttentionSpec) -> None:
    """Raises UnsupportedOp for heads that cannot be shared out."""
    if spec.num_heads % spec.num_kv_heads:
        raise refused(op, f"{spec.num_heads} query heads over {spec.num_kv_heads} KV heads")


def check_experts(spec: MoESpec, gate_up: Packed, down: Packed) -> None:
    """Raises UnsupportedOp for experts that cannot be chosen or do not fit each other."""
    if not 1 <= spec.top_k <= spec.num_experts:
        raise refused("moe", f"top-{spec.top_k} of {spec.num_experts} experts")
    if {spec.num_experts} != {w.shape[0] for w in (gate_up, down)}:
        raise refused("moe", f"{spec.num_experts} experts over {gate_up.shape}, {down.shape}")
    if gate_up.shape[1] != 2 * down.shape[2]:
        raise refused("moe", f"{gate_up.shape[1]} gates and ups before {down.shape[2]} inputs")


def payload(weight: Packed) -> Weight:
    """What `pack` made."""
    assert isinstance(weight.payload, Weight)
    return weight.payload


def vector_node(tape: Tape, weight: Packed) -> Node:
    """A norm, bias or sinks vector on this tape."""
    vector = payload(weight).vector
    assert vector is not None
    return tape.external(vector.ctypes.data, 0, (len(vector),), keep=vector)


def _optional(tape: Tape, weight: Packed | None) -> Node | None:
    return None if weight is None else vector_node(tape, weight)
