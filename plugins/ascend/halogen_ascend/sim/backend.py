"""The `Backend` of a simulated part."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_ascend.advice import Advice
from halogen_ascend.buckets import Buckets
from halogen_ascend.constraints import BLOCK_SIZES, FUSED_HEAD_DIMS
from halogen_ascend.heat import Heat
from halogen_ascend.options import SimOptions
from halogen_ascend.padding import TrashBlock
from halogen_ascend.sim import graph as graphs
from halogen_ascend.sim import weights
from halogen_ascend.sim.buffer import DeviceBuffer
from halogen_ascend.sim.device import SimDevice
from halogen_ascend.sim.faults import FaultPlan
from halogen_ascend.sim.health import Health
from halogen_ascend.sim.kvcache import KV_DTYPES, KVPool, kv_layout, pool_of
from halogen_ascend.sim.memory import Hbm
from halogen_ascend.sim.ops import SimOps
from halogen_ascend.sim.plan import plan, tiers
from halogen_ascend.sim.rope import RopeTables
from halogen_ascend.sim.signatures import refusals
from halogen_core.spi import (
    FLOAT8,
    FORMATS,
    OPS,
    Capabilities,
    Conversions,
    Cost,
    KVBlocks,
    KVCache,
    KVLayout,
    KVSpec,
    Limits,
    MemoryPlan,
    MemoryRequest,
    MemoryTier,
    OpSignature,
    PackedWeight,
    Placement,
    QuantTensor,
    Sampled,
    StepBatch,
    StepMeta,
    StepShape,
    Support,
    SupportLevel,
    Telemetry,
    WeightRole,
    check_block_ids,
)

MAX_CONTEXT = 1 << 20
Step = Callable[[StepMeta[DeviceBuffer]], Sampled[DeviceBuffer]]


@attrs.define(eq=False, slots=False)
class SimBackend:
    """One simulated part, opened. Nothing here is a torch device."""

    device: SimDevice
    options: SimOptions
    ops: SimOps
    advice: Advice
    _closed: bool = False
    _trash: TrashBlock | None = None
    _buckets: Buckets = attrs.field(init=False)
    conversions: Conversions = attrs.field(init=False, factory=Conversions)

    def __attrs_post_init__(self) -> None:
        self._buckets = Buckets(self.options.graph_buckets)

    @classmethod
    def open(cls, options: SimOptions) -> SimBackend:
        """Open `options.part` with its pools, cores and faults."""
        device = SimDevice(
            options.part,
            Hbm.open(options.part, options.pools),
            faults=FaultPlan(options.faults),
            health=Health(blocking=options.blocking),
            launch_s=options.launch_s,
            threads=options.threads,
        )
        ops = SimOps(
            device, options.dtype, options.kv_split, RopeTables(device, options.rope_align)
        )
        heat = Heat(name=f"ascend:{device.name}")
        return cls(device, options, ops, Advice(options.part, heat, launch_s=options.launch_s))

    # -- identity
    def capabilities(self) -> Capabilities:
        part = self.options.part
        wide = self.options.dtype == "f32"
        native = {self.options.dtype.upper(): "native", "W8A8": "native"}
        native["W8A16"] = "emulated" if wide else "native"
        return Capabilities(
            name="ascend",
            device=f"ascend:sim:{part.name} ({part.cube_cores} cube cores, simulated)",
            compute_dtypes=(self.options.dtype,),
            weight_formats={**dict.fromkeys((*FORMATS, *FLOAT8), "emulated"), **native},
            kv_dtypes=KV_DTYPES,
            kv_block_sizes=BLOCK_SIZES,
            graph_capture=bool(self.options.graph_buckets),
            max_context=MAX_CONTEXT,
            alignment=part.alignment,
            deterministic=True,
            batch_invariant=True,
            extra={
                "simulated": "true",
                "hypothetical": str(part.hypothetical).lower(),
                "host_align": "65536",
            },
        )

    def supports(self, signature: OpSignature) -> Support:
        if said := refusals(signature, self.options.dtype):
            return Support(level=SupportLevel.NO, reasons=said)
        dim = signature.attention and signature.attention.head_dim
        if signature.op == "attention" and dim and dim not in FUSED_HEAD_DIMS:
            text = f"head dim {dim} is not among {FUSED_HEAD_DIMS} of the fused operator: composed"
            return Support(level=SupportLevel.FALLBACK, reasons=(text,))
        return Support(level=SupportLevel.NATIVE)

    def placement(self) -> tuple[Placement, ...]:
        part = self.options.part.name
        return self.conversions.told(
            Placement(
                op=op,
                level=SupportLevel.NATIVE,
                implementation=f"micro-tasks on simulated {part}",
                reasons=(f"composed unless head dim is one of {FUSED_HEAD_DIMS}",)
                if op == "attention"
                else (),
            )
            for op in OPS
        )

    # -- memory
    def memory(self) -> tuple[MemoryTier, ...]:
        return tiers(self.device)

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        return plan(self.device, request)

    # -- arrays
    def upload(self, host: NDArray[Any]) -> DeviceBuffer:
        return self.device.copy_in(np.asarray(host))

    def download(self, array: DeviceBuffer) -> NDArray[Any]:
        self.device.synchronize()
        data = self.device.copy_out(array)
        return (data.float() if data.is_floating_point() else data).numpy()

    def upload_step(self, batch: StepBatch) -> StepMeta[DeviceBuffer]:
        return graphs.StepInputs.upload(self.device, batch).meta(batch)

    def synchronize(self) -> None:
        self.device.synchronize()

    def close(self) -> None:
        self._closed = True

    # -- weights
    def pack(self, parts: Sequence[QuantTensor], role: WeightRole) -> PackedWeight[DeviceBuffer]:
        packed = weights.pack(self.device, parts, role, self.options.dtype)
        for part in parts:
            if part.format in FLOAT8:
                self.conversions.add_float8(part, self.options.dtype)
        self.advice.add_weight(packed)
        return packed

    def unpack(self, weight: PackedWeight[DeviceBuffer]) -> NDArray[Any]:
        return weights.unpack(weight)

    # -- KV
    def kv_layout(self, spec: KVSpec) -> KVLayout:
        return kv_layout(spec)

    def kv_alloc(self, layout: KVLayout, num_blocks: int) -> KVCache:
        pool = KVPool.allocate(self.device, layout.spec, num_blocks)
        self.advice.set_kv(layout)
        self._trash = TrashBlock(block=pool.trash, size=layout.spec.block_size)
        return KVCache(layout=layout, num_blocks=num_blocks, payload=pool)

    def kv_copy(self, kv: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        pool = pool_of(kv)
        check_block_ids([block for pair in pairs for block in pair], pool.num_blocks)
        for source, target in pairs:
            pool.copy(source, target)

    def kv_export(self, kv: KVCache, blocks: Sequence[int]) -> KVBlocks:
        self.device.synchronize()
        return pool_of(kv).export(blocks)

    def kv_import(self, kv: KVCache, blocks: Sequence[int], data: KVBlocks) -> None:
        pool_of(kv).load(blocks, data)

    # -- step capture
    def capture_key(self, batch: StepBatch) -> Hashable | None:
        return self._buckets.key(batch)

    def capture(self, step: Step, batch: StepBatch) -> graphs.SimReplay | None:
        if self._trash is None:
            return None
        return graphs.capture(self.device, self._buckets, step, batch, self._trash)

    # -- advice and telemetry
    def limits(self) -> Limits:
        # the simulated sensors cost nothing: whoever asks for limits is told of the heat now
        self.advice.heat.take(self.device.sense())
        return self.advice.limits(self.options.graph_buckets)

    def cost(self, shape: StepShape) -> Cost | None:
        return self.advice.cost(shape)

    def observe(self, shape: StepShape, seconds: float) -> None:
        self.advice.observe(shape, seconds)

    def counters(self) -> Telemetry:
        line, hbm = self.device.timeline, self.device.hbm
        counters = {
            "simulated_seconds": self.device.now,
            "launches": float(line.launches),
            "micro_tasks": float(line.tasks),
            "hbm_bytes": float(line.hbm_bytes),
            "l2_bytes": float(line.l2_bytes),
            "cross_bank_bytes": float(line.crossed_bytes),
            "graph_replays": float(self._buckets.replays),
            "fallback_attention_calls": float(self.ops.composed),
            "device_throttle_events": float(self.advice.heat.events),
        }
        gauges = {
            "core_utilisation": line.busy_s / line.core_s if line.core_s else 0.0,
            **self.advice.heat.gauges(),
        }
        for name, pool in hbm.pools.items():
            gauges[f"pool_{name}_bytes"] = float(pool.used)
            gauges[f"pool_{name}_peak_bytes"] = float(pool.peak)
            gauges[f"pool_{name}_fragmentation"] = pool.fragmentation if pool.allocations else 0.0
        return Telemetry(counters=counters, gauges=gauges)
