"""The ops by our kernels, as custom nodes of the same graphs; ggml's own ops where those do."""

from __future__ import annotations

import ctypes as C
from typing import Any

import attrs
import numpy as np

from halogen_core.spi import (
    Activation,
    AttentionSpec,
    KVCache,
    MoESpec,
    RopeSpec,
    RopeStyle,
    Sampled,
)
from halogen_cpu_ggml import native, picking
from halogen_cpu_ggml.experts import mixture
from halogen_cpu_ggml.kv_tiles import TilePool
from halogen_cpu_ggml.native import ACTIVATION_BLOCK, Kernels
from halogen_cpu_ggml.ops import (
    GgmlOps,
    Meta,
    Packed,
    check_experts,
    check_heads,
    payload,
    sampled_nodes,
    step_inputs,
    vector_node,
)
from halogen_cpu_ggml.recorder import empty_like, in_order, joined, rows_address
from halogen_cpu_ggml.tape import Node, Tape
from halogen_cpu_ggml.tiles import Slabs, huge_zeros, make_tiles
from halogen_cpu_ggml.weights import Part

COUNTER_BYTES = 4096 * 8
"""Of split attention, at the head of its workspace."""


@attrs.define(eq=False)
class KernelOps(GgmlOps):
    """`Ops` with linears, norms, gates, rotary store, attention and sampling by our kernels."""

    kernels: Kernels
    partial_bytes: int = 0
    """Workspace of split attention per chunk of keys, the largest seen so far."""
    scratch: Any = None
    slabs: Slabs = attrs.field(factory=Slabs)

    # -- norms and gates

    def rms_norm(self, x: Node, weight: Packed, *, eps: float) -> Node:
        if x.shape[0] == 0:
            return empty_like(x.shape)
        with self.recorder.tape() as tape:
            return self._norm(tape, joined(tape, x), None, weight, eps)[0]

    def add_rms_norm(
        self, x: Node, residual: Node, weight: Packed, *, eps: float
    ) -> tuple[Node, Node]:
        if x.shape[0] == 0:
            return empty_like(x.shape), empty_like(x.shape)
        with self.recorder.tape() as tape:
            return self._norm(tape, joined(tape, x), joined(tape, residual), weight, eps)

    def _norm(
        self, tape: Tape, x: Node, residual: Node | None, weight: Packed, eps: float
    ) -> tuple[Node, Node]:
        params = native.Norm(width=x.shape[-1], eps=eps, rows=rows_address(tape, x))
        reads = {"x": x, "weight": vector_node(tape, weight)}
        writes, total = {}, x
        if residual is not None:
            reads["residual"] = residual
            total = tape.second(x.shape)
            total.rows = x.rows
            writes["sum"] = total
        out = tape.custom(
            self.kernels.table.norm, params, shape=x.shape, reads=reads, writes=writes
        )
        out.rows, out.emitter = x.rows, params
        return out, total

    def gated_act(self, gate_up: Node, kind: Activation) -> Node:
        t, f = gate_up.shape[0], gate_up.shape[1] // 2
        if t == 0:
            return empty_like((0, f))
        with self.recorder.tape() as tape:
            whole = joined(tape, gate_up)
            params = native.Gate(
                width=f, kind=native.ACTIVATIONS[kind.value], rows=rows_address(tape, whole)
            )
            out = tape.custom(
                self.kernels.table.gate, params, shape=(t, f), reads={"gate_up": whole}
            )
            out.rows, out.emitter = whole.rows, params
        return out

    def select_rows(self, x: Node, meta: Meta) -> Node:
        r, width = meta.logit_rows.shape[0], x.shape[1]
        if r == 0:
            return empty_like((0, width))
        with self.recorder.tape() as tape:
            params = native.Rows(step=C.addressof(step_inputs(meta).step), width=width)
            kernel = self.kernels.table.rows
            out = tape.custom(kernel, params, shape=(r, width), reads={"x": joined(tape, x)})
            out.rows = meta.logit_rows.rows
        return out

    # -- linears

    def linear(self, x: Node, weight: Packed, *, bias: Packed | None = None) -> Node:
        return self._linear(x, weight, bias=bias)

    def logits(
        self, x: Node, weight: Packed, *, scale: float = 1.0, softcap: float | None = None
    ) -> Node:
        return self._linear(x, weight, scale=scale, softcap=softcap)

    def _linear(
        self,
        x: Node,
        weight: Packed,
        *,
        bias: Packed | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Node:
        t, n = x.shape[0], weight.shape[-2]
        if t == 0:
            return empty_like((0, n))
        with self.recorder.tape() as tape:
            x = joined(tape, x)
            return self._product(tape, x, weight, bias=bias, scale=scale, softcap=softcap)

    def _product(
        self,
        tape: Tape,
        x: Node,
        weight: Packed,
        *,
        bias: Packed | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Node:
        n = weight.shape[-2]
        parts, packs = self._parts(tape, x, payload(weight).parts)
        params = native.Linear(
            rows=rows_address(tape, x), k=x.shape[1], stride=n,
            scale=scale, softcap=softcap or 0.0,
            nparts=len(parts), parts=C.addressof(parts),
        )  # fmt: skip
        reads = {} if bias is None else {"bias": vector_node(tape, bias)}
        out = tape.custom(self.kernels.table.linear, params, shape=(x.shape[0], n), reads=reads)
        for part, pack in zip(parts, packs, strict=True):
            tape.point(part, "x", pack)
        tape.keep.append(parts)
        out.rows = x.rows
        return out

    def _parts(self, tape: Tape, x: Node, weights: tuple[Part, ...]) -> tuple[Any, list[Node]]:
        """The parameter array of a stacked weight, and each part's form of x."""
        array = (native.PartTiles * len(weights))()
        packs, column = [], 0
        for slot, part in zip(array, weights, strict=True):
            tiles = self.tiles(part)
            tape.keep.append(tiles)
            slot.tiles, slot.format = tiles.address, native.FORMATS[part.format]
            slot.n, slot.column = part.outputs, column
            column += part.outputs
            packs.append(self._packed(tape, in_order(tape, x, part), part.format))
        return array, packs

    def tiles(self, part: Part) -> Any:
        """A part in the kernels' order, laid out when first wanted."""
        if part.tiles is None:
            part.tiles = make_tiles(self.kernels, self.slabs, part, self.recorder.team.threads)
        return part.tiles

    def _packed(self, tape: Tape, x: Node, fmt: str) -> Node:
        """X in panels of floats or 8-bit blocks; written by its producer if that can."""
        form = "f32" if fmt in native.FLOAT_FORMATS else "q8"
        made = x.packed.get(form)
        if made is not None and made.tape is tape:
            return made
        t, k = x.shape
        pack = tape.scratch(t * (native.activation_bytes(k) if form == "q8" else k * 4))
        if form == "q8" and x.emitter is not None and x.tape is tape:
            pack.born = x.born
            tape.own(pack)
            tape.point(x.emitter, "packed", pack)
        else:
            kernel = self.kernels.table.pack_q8 if form == "q8" else self.kernels.table.pack_f32
            params = native.PackX(rows=rows_address(tape, x), k=k)
            tape.custom(
                kernel, params, shape=(1,), reads={"x": x}, writes={"out": pack}, out="unused"
            )
        x.packed[form] = pack
        return pack

    def moe(self, x: Node, router: Packed, gate_up: Packed, down: Packed, spec: MoESpec) -> Node:
        check_experts(spec, gate_up, down)
        if x.shape[0] == 0:
            return empty_like(x.shape)
        with self.recorder.tape() as tape:
            x = joined(tape, x)
            parts = payload(gate_up).parts, payload(down).parts
            return mixture(self, tape, x, self._product(tape, x, router), *parts, spec)

    # -- attention

    def _angles(self, tape: Tape, meta: Meta, rope: RopeSpec) -> Node:
        """Cosines and sines of the step's positions, once per kind of rotation."""
        key = ("angles", rope)
        if key not in tape.memo:
            frequencies = np.array(rope.inv_freq, np.float64)
            tape.keep.append(frequencies)
            inputs = step_inputs(meta)
            params = native.Angles(
                step=C.addressof(inputs.step),
                inv_freq=frequencies.ctypes.data,
                dim=rope.dim,
                factor=rope.attention_factor,
            )
            shape = (meta.positions.shape[0], rope.dim)
            tape.memo[key] = tape.custom(self.kernels.table.angles, params, shape=shape)
        node = tape.memo[key]
        assert isinstance(node, Node)
        return node

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
        pool = kv.payload
        assert isinstance(pool, TilePool)
        with self.recorder.tape() as tape:
            reads = {"qkv": joined(tape, qkv)}
            for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
                if norm is not None:
                    reads[name] = vector_node(tape, norm)
            if spec.rope is not None:
                reads["angles"] = self._angles(tape, meta, spec.rope)
            rope = spec.rope
            params = native.Store(
                step=C.addressof(step_inputs(meta).step),
                hq=spec.num_heads,
                dim=rope.dim if rope else 0,
                interleaved=rope is not None and rope.style is RopeStyle.INTERLEAVED,
                eps=spec.norm_eps,
                pool=pool.pool(layer),
            )
            tape.keep.append(pool)
            out = tape.custom(self.kernels.table.store, params, shape=(t, width), reads=reads)
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
        pool = kv.payload
        assert isinstance(pool, TilePool)
        inputs = step_inputs(meta)
        self._reserve(spec, inputs)
        with self.recorder.tape() as tape:
            reads = {"q": joined(tape, q)}
            if sinks is not None:
                reads["sinks"] = vector_node(tape, sinks)
            params = native.Attend(
                step=C.addressof(inputs.step),
                hq=spec.num_heads,
                window=spec.window or 0,
                scale=spec.scale,
                softcap=spec.softcap or 0.0,
                pool=pool.pool(layer),
            )
            tape.keep.append(pool)
            out = tape.custom(self.kernels.table.attend, params, shape=q.shape, reads=reads)
            out.rows = q.rows
            if spec.head_dim % ACTIVATION_BLOCK == 0:
                out.emitter = params
        return out

    def _reserve(self, spec: AttentionSpec, inputs: Any) -> None:
        """Workspace for split attention; refilled before each step when recording."""
        dp = -(-spec.head_dim // native.TILE) * native.TILE
        share = spec.num_heads // spec.num_kv_heads
        groups = spec.num_kv_heads * share  # at most one group per query head
        each = groups * (native.MOST_ROWS * (dp + 2) * 4 + 128)
        self.partial_bytes = max(self.partial_bytes, each)
        if self.recorder.current is None:
            self.workspace(inputs)

    def workspace(self, inputs: Any) -> None:
        """Point a loaded step at memory for its partial results."""
        lens = inputs.batch.seq_lens
        chunks = int((lens // native.CHUNK).sum()) + len(lens)
        need = COUNTER_BYTES + chunks * self.partial_bytes
        if self.scratch is None or self.scratch.nbytes < need:
            self.scratch = huge_zeros(need * 3 // 2)
        inputs.step.workspace = self.scratch.ctypes.data
        inputs.step.workspace_bytes = self.scratch.nbytes
        inputs.scratch = self.scratch

    # -- sampling

    def sample(self, logits: Node, meta: Meta) -> Sampled[Node]:
        inputs = step_inputs(meta)
        if logits.shape[0] == 0:
            return super().sample(logits, meta)
        with self.recorder.tape() as tape:
            picker = picking.record(tape, self.kernels.table.sample, joined(tape, logits), inputs)
            if self.recorder.current is None:
                picker.load(inputs.sampling)
        if self.recorder.current is not None:
            return Sampled(token_ids=picker.ids)
        return sampled_nodes(picker.result(inputs.sampling))
