"""The two ops that touch the KV cache."""

from __future__ import annotations

import attrs
import torch

from halogen_ascend.constraints import FUSED_HEAD_DIMS
from halogen_ascend.sim import attention as paged
from halogen_ascend.sim import vector
from halogen_ascend.sim.buffer import DeviceBuffer
from halogen_ascend.sim.kvcache import pool_of
from halogen_ascend.sim.launcher import Launcher, Meta, Packed, row_bytes
from halogen_ascend.sim.rope import RopeTables, rotate
from halogen_ascend.sim.signatures import refuse_attention
from halogen_ascend.sim.tasks import Program
from halogen_core.spi import AttentionSpec, KVCache, StepBatch


@attrs.define(eq=False, slots=False)
class AttentionOps(Launcher):
    """`chunk_blocks` KV blocks per task; `composed` counts calls that could not run fused."""

    chunk_blocks: int
    rope: RopeTables
    composed: int = attrs.field(default=0, kw_only=True)

    def qkv_rope_store(
        self,
        qkv: DeviceBuffer,
        kv: KVCache,
        layer: int,
        meta: Meta,
        spec: AttentionSpec,
        *,
        q_norm: Packed | None = None,
        k_norm: Packed | None = None,
    ) -> DeviceBuffer:
        refuse_attention("qkv_rope_store", spec)
        pool = pool_of(kv)
        out = self.new(qkv.shape[0], spec.num_heads * spec.head_dim)

        def build(host: StepBatch | None) -> Program:
            assert host is not None
            pool.check_slots(host)
            heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
            source = self.read(qkv, "qkv_rope_store", "qkv")
            target = self.device.write(out, "qkv_rope_store")
            rows, dim = qkv.shape[0], spec.head_dim
            source = source.view(rows, sum(heads), dim)
            target = target.view(rows, spec.num_heads, dim)
            slots = self.device.read(meta.slot_mapping, "qkv_rope_store", "slot_mapping")
            table = self._rope_rows(spec, meta, host)
            norms = [self.optional(w, "qkv_rope_store") for w in (q_norm, k_norm)]

            def work(a: int, b: int) -> None:
                q, k, v = torch.split(source[a:b].float(), heads, 1)
                q, k = (
                    part if gamma is None else vector.rms_norm(part, gamma, spec.norm_eps)
                    for part, gamma in zip((q, k), norms, strict=True)
                )
                if table is not None and spec.rope is not None:
                    q, k = (rotate(part, table[a:b], spec.rope) for part in (q, k))
                target[a:b] = q
                pool.store(layer, slots[a:b], k, v)

            return self.rows("qkv_rope_store", len(source), 3 * row_bytes(qkv), work)

        self.device.submit("qkv_rope_store", build, meta.host)
        return out

    def attention(
        self,
        q: DeviceBuffer,
        kv: KVCache,
        layer: int,
        meta: Meta,
        spec: AttentionSpec,
        *,
        sinks: Packed | None = None,
    ) -> DeviceBuffer:
        refuse_attention("attention", spec)
        out = self.new(*q.shape)
        if spec.head_dim not in FUSED_HEAD_DIMS:
            self.composed += 1

        def build(host: StepBatch | None) -> Program:
            assert host is not None
            shape = (q.shape[0], spec.num_heads, spec.head_dim)
            call = paged.Call(
                q=self.read(q, "attention", "q").view(shape),
                out=self.device.write(out, "attention").view(shape),
                kv=pool_of(kv),
                layer=layer,
                spec=spec,
                sinks=self.optional(sinks, "attention"),
                chunk_blocks=self.chunk_blocks,
            )
            return paged.program(call, host)

        self.device.submit("attention", build, meta.host)
        return out

    def _rope_rows(self, spec: AttentionSpec, meta: Meta, host: StepBatch) -> torch.Tensor | None:
        if spec.rope is None:
            return None
        table = self.rope.table(spec.rope, int(host.positions.max(initial=0)) + 1)
        positions = self.device.read(meta.positions, "qkv_rope_store", "positions").long()
        return self.device.read(table, "qkv_rope_store", "cos_sin")[positions]
