"""The `Backend` of a real NPU: torch tensors on device `npu`, the vendor's fused operators."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import attrs
import torch
from numpy.typing import NDArray
from torch import Tensor

from halogen_ascend.buckets import Buckets
from halogen_ascend.captured import Captured
from halogen_ascend.constraints import BLOCK_SIZES, attention_denials
from halogen_ascend.device_string import DEFAULT_PROFILE
from halogen_ascend.heat import Heat, Reading
from halogen_ascend.import_errors import explain_import_error
from halogen_ascend.npu import graph, kv
from halogen_ascend.npu.heat_poll import HeatPoll, sense
from halogen_ascend.npu.ops import NpuOps
from halogen_ascend.npu.weights import Int8Weight, pack_int8
from halogen_ascend.padding import TrashBlock, pad
from halogen_ascend.sim.profiles import profile
from halogen_ascend.weights.dequantize import INT8_FORMATS
from halogen_core.spi import (
    BackendOptions,
    BackendUnavailable,
    Capabilities,
    Cost,
    DoctorContext,
    KVBlocks,
    KVCache,
    KVLayout,
    KVSpec,
    Limits,
    MemoryTier,
    OpSignature,
    PackedWeight,
    QuantTensor,
    Sampled,
    StepBatch,
    StepMeta,
    StepShape,
    Support,
    SupportLevel,
    Telemetry,
    TorchBackend,
    WeightRole,
)

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
RIDGE = profile(DEFAULT_PROFILE)
"""Stands for the part, whose own figures torch_npu does not tell."""


def open_npu(index: int, options: BackendOptions) -> NpuBackend:
    """Open device `index`. Raises `BackendUnavailable` with the loader's message explained."""
    try:
        import torch_npu  # type: ignore[import-not-found]
    except (ImportError, RuntimeError, OSError) as exc:
        said = explain_import_error(str(exc))
        raise BackendUnavailable(
            f"`ascend:{index}` cannot start", reasons=[said.cause], code="HRT-7110", fix=said.fix
        ) from exc
    count = torch_npu.npu.device_count()
    if index >= count:
        raise BackendUnavailable(
            f"device `ascend:{index}` is absent",
            reasons=[f"torch_npu sees {count} devices"],
            code="HRT-7110",
            fix="check `npu-smi info`; the simulator is used only when named: ascend:sim",
        )
    _runtime().set_device(index)
    opened = NpuBackend(options, device=f"npu:{index}", dtype=torch.float16, name="ascend")
    live = Captured(DoctorContext())
    opened.watch_heat(lambda: sense(live, index))
    return opened


def _runtime() -> Any:
    """`torch.npu`, which exists once torch_npu is imported."""
    return getattr(torch, "npu")  # noqa: B009 - no such attribute for a type checker


class NpuBackend(TorchBackend):
    """Unverified on hardware: written from operator schemas and public call patterns."""

    ops_class: ClassVar[type[NpuOps]] = NpuOps
    invariant_ops_class = None

    def __init__(self, options: BackendOptions, **fields: Any) -> None:
        super().__init__(options, **fields)
        self._buckets = Buckets(BUCKETS)
        self._trash: TrashBlock | None = None
        self.heat = Heat(name=f"{self.name}:{self.device.index or 0}")
        self._poll: HeatPoll | None = None

    def watch_heat(self, read: Callable[[], Reading | None]) -> None:
        """Follow the sensors that `read` asks, until closed."""
        self._poll = HeatPoll(self.heat, read)
        self._poll.start()

    def capabilities(self) -> Capabilities:
        whole = super().capabilities()
        return attrs.evolve(
            whole,
            weight_formats={**whole.weight_formats, **dict.fromkeys(INT8_FORMATS, "native")},
            kv_dtypes=("bf16", "f16") if self.dtype is torch.bfloat16 else ("f16", "bf16"),
            kv_block_sizes=BLOCK_SIZES,
            graph_capture=True,
            alignment=512,
            deterministic=False,
            extra={"host_align": "65536"},
        )

    def supports(self, signature: OpSignature) -> Support:
        said = super().supports(signature)
        spec = signature.attention
        if said.level is SupportLevel.NO or spec is None or signature.op != "attention":
            return said
        if denials := attention_denials(spec):
            return Support(level=SupportLevel.FALLBACK, reasons=tuple(denials))
        return Support(level=SupportLevel.NATIVE)

    def memory(self) -> tuple[MemoryTier, ...]:
        free, total = _runtime().mem_get_info(self.device)
        tier = MemoryTier(
            name="device", total=total, free=free, granule=512, source="torch.npu.mem_get_info"
        )
        return (tier,)

    def limits(self) -> Limits:
        most = RIDGE.ridge_tokens(self.heat.clock_share) if self.heat.throttled else None
        return Limits(max_tokens=most, token_buckets=BUCKETS)

    def cost(self, shape: StepShape) -> Cost | None:
        told, share = super().cost(shape), self.heat.clock_share
        return told and Cost(p50=told.p50 / share, p95=told.p95 / share)

    def observe(self, shape: StepShape, seconds: float) -> None:
        # learnt in seconds of the full clock, so that heat is not learnt a second time
        super().observe(shape, seconds * self.heat.clock_share)

    def counters(self) -> Telemetry:
        ops = self.ops
        composed = ops.composed if isinstance(ops, NpuOps) else 0
        return Telemetry(
            counters={
                "fallback_attention_calls": float(composed),
                "device_throttle_events": float(self.heat.events),
            },
            gauges={**super().counters().gauges, **self.heat.gauges()},
        )

    def close(self) -> None:
        if self._poll is not None:
            self._poll.stop()
        super().close()

    def pack(self, parts: Sequence[QuantTensor], role: WeightRole) -> PackedWeight[Tensor]:
        if role is WeightRole.LINEAR and any(p.format in INT8_FORMATS for p in parts):
            return pack_int8(parts, self.device, self.dtype)
        packed = super().pack(parts, role)
        if role is WeightRole.NORM:
            return attrs.evolve(packed, payload=packed.payload.to(self.dtype))
        if role is WeightRole.EXPERTS:
            # the grouped operator wants [E, K, N]
            return attrs.evolve(packed, payload=packed.payload.transpose(1, 2).contiguous())
        return packed

    def unpack(self, weight: PackedWeight[Tensor]) -> NDArray[Any]:
        payload = weight.payload
        if isinstance(payload, Int8Weight):
            return self.download(payload.matrix())
        if weight.role is WeightRole.EXPERTS:
            return self.download(payload.transpose(1, 2))
        return super().unpack(weight)

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        return kv.layout_of(spec)

    def kv_alloc(self, layout: KVLayout, num_blocks: int) -> KVCache:
        self._trash = TrashBlock(block=num_blocks, size=layout.spec.block_size)
        return kv.allocate(layout, num_blocks, self.device)

    def kv_copy(self, kv_cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        kv.copy_blocks(kv_cache, pairs)

    def kv_export(self, kv_cache: KVCache, blocks: Sequence[int]) -> KVBlocks:
        return kv.export_blocks(kv_cache, blocks)

    def kv_import(self, kv_cache: KVCache, blocks: Sequence[int], data: KVBlocks) -> None:
        kv.import_blocks(kv_cache, blocks, data)

    def capture_key(self, batch: StepBatch) -> Hashable | None:
        return self._buckets.key(batch) if graph.plain_greedy(batch) else None

    def capture(
        self, step: Callable[[StepMeta[Tensor]], Sampled[Tensor]], batch: StepBatch
    ) -> graph.NpuReplay | None:
        size = self._buckets.size(batch.num_sequences)
        ops = self.ops
        if size is None or self._trash is None or not isinstance(ops, NpuOps):
            return None
        padded = pad(batch, size, self._trash)
        meta = self.upload_step(padded)
        step(self.upload_step(padded))  # kernels are compiled and caches filled outside the capture
        captured, ops.tasks = _runtime().NPUGraph(), graph.TaskList(_runtime())
        try:
            with _runtime().graph(captured):
                made = step(meta)
            tasks = ops.tasks
        finally:
            ops.tasks = None
        stream = _runtime().Stream()
        return graph.NpuReplay(captured, tasks, meta, made, size, self._trash, stream)
