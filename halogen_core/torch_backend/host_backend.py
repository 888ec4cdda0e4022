"""A whole backend for a device that only moves arrays: everything else happens on the host.

A new device has a complete backend on its first day when it can move arrays; it becomes fast by
overriding one op after the other. What still goes through the host is counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Generic

import attrs
from numpy.typing import NDArray

from halogen_core.spi.arrays import Array
from halogen_core.spi.backend import Capabilities, Replay
from halogen_core.spi.memory import (
    KVBlocks,
    KVCache,
    KVLayout,
    KVSpec,
    MemoryPlan,
    MemoryRequest,
    MemoryTier,
)
from halogen_core.spi.operations import (
    OpSignature,
    PackedWeight,
    Placement,
    QuantTensor,
    Support,
    SupportLevel,
    WeightRole,
)
from halogen_core.spi.ops import OPS, Ops
from halogen_core.spi.records import BackendOptions, Cost, Limits, StepShape, Telemetry
from halogen_core.spi.step import Sampled, StepBatch, StepMeta
from halogen_core.torch_backend.backend import TorchBackend
from halogen_core.torch_backend.host_ops import HostFallbackOps, OnHost


class HostFallbackBackend(ABC, Generic[Array]):
    """A complete backend for a device that so far only moves arrays.

    Subclass it with `upload` and `download`; then override `memory`, an op in `ops_class`, `pack`
    with `unpack`, or the five KV methods together, each whenever the device can do it. With the
    first op of its own the host's claims to be deterministic and batch-invariant are withdrawn:
    claim them in `capabilities` where they hold.
    """

    ops_class: ClassVar[type[HostFallbackOps[Any]]] = HostFallbackOps

    def __init__(
        self, options: BackendOptions | None = None, *, name: str, description: str = ""
    ) -> None:
        self.name = name
        self.description = description or f"{name} through the host"
        self.host = TorchBackend(options, name=name)
        self._ops: HostFallbackOps[Array] = self.ops_class(self, self.host)

    # -- the device

    @abstractmethod
    def upload(self, host: NDArray[Any]) -> Array:
        """A device copy of a host array."""

    @abstractmethod
    def download(self, array: Array) -> NDArray[Any]:
        """A host copy of a device array; floating arrays as float32."""

    # -- identity

    @property
    def ops(self) -> Ops[Array]:
        return self._ops

    def capabilities(self) -> Capabilities:
        host = self.host.capabilities()
        # what the host promises of its own ops says nothing about a device's
        inherited = all(self._owner(op) is HostFallbackOps for op in OPS)
        return attrs.evolve(
            host,
            name=self.name,
            device=self.description,
            weight_formats=dict.fromkeys(host.weight_formats, "emulated"),
            deterministic=inherited and host.deterministic,
            batch_invariant=inherited and host.batch_invariant,
        )

    def supports(self, signature: OpSignature) -> Support:
        answer = self.host.supports(signature)
        if answer.level is SupportLevel.NO:
            return answer
        placement = self._place(signature.op)
        return Support(level=placement.level, reasons=placement.reasons)

    def placement(self) -> tuple[Placement, ...]:
        return self.host.conversions.told(self._place(op) for op in OPS)

    def _owner(self, op: str) -> type:
        return next(cls for cls in type(self._ops).__mro__ if op in vars(cls))

    def _place(self, op: str) -> Placement:
        owner = self._owner(op)
        if owner is not HostFallbackOps:
            implementation = f"{owner.__module__}.{owner.__qualname__}"
            return Placement(op=op, level=SupportLevel.NATIVE, implementation=implementation)
        return Placement(
            op=op,
            level=SupportLevel.FALLBACK,
            implementation="torch on the host",
            reasons=(f"`{self.name}` does not have it yet; arrays go to the host and back",),
        )

    # -- memory, arrays

    def memory(self) -> tuple[MemoryTier, ...]:
        return self.host.memory()

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        return self.host.plan(request)

    def upload_step(self, batch: StepBatch) -> StepMeta[Array]:
        return StepMeta(
            host=batch,
            token_ids=self.upload(batch.token_ids),
            positions=self.upload(batch.positions),
            slot_mapping=self.upload(batch.slot_mapping),
            query_start_loc=self.upload(batch.query_start_loc),
            seq_lens=self.upload(batch.seq_lens),
            block_tables=self.upload(batch.block_tables),
            logit_rows=self.upload(batch.logit_rows),
            sampling=batch.sampling,
        )

    def synchronize(self) -> None:
        self.host.synchronize()

    def close(self) -> None:
        self.host.close()

    # -- weights

    def pack(self, parts: Sequence[QuantTensor], role: WeightRole) -> PackedWeight[Array]:
        packed = self.host.pack(parts, role)
        return PackedWeight(
            payload=OnHost(packed),
            shape=packed.shape,
            nbytes=packed.nbytes,
            format_id=packed.format_id,
            role=role,
            parts=packed.parts,
        )

    def unpack(self, weight: PackedWeight[Array]) -> NDArray[Any]:
        return self.host.unpack(weight.payload.value)

    # -- KV

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        return self.host.kv_layout(spec)

    def kv_alloc(self, layout: KVLayout, num_blocks: int) -> KVCache:
        pool = self.host.kv_alloc(layout, num_blocks)
        return KVCache(layout=layout, num_blocks=num_blocks, payload=OnHost(pool))

    def kv_copy(self, kv: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        self.host.kv_copy(kv.payload.value, pairs)

    def kv_export(self, kv: KVCache, blocks: Sequence[int]) -> KVBlocks:
        return self.host.kv_export(kv.payload.value, blocks)

    def kv_import(self, kv: KVCache, blocks: Sequence[int], data: KVBlocks) -> None:
        self.host.kv_import(kv.payload.value, blocks, data)

    # -- step capture, advice, telemetry

    def capture_key(self, batch: StepBatch) -> Hashable | None:
        return None

    def capture(
        self, step: Callable[[StepMeta[Array]], Sampled[Array]], batch: StepBatch
    ) -> Replay[Array] | None:
        return None

    def limits(self) -> Limits:
        return self.host.limits()

    def cost(self, shape: StepShape) -> Cost | None:
        return self.host.cost(shape)

    def observe(self, shape: StepShape, seconds: float) -> None:
        self.host.observe(shape, seconds)

    def counters(self) -> Telemetry:
        counts = {key: float(value) for key, value in self._ops.counts.items()}
        return Telemetry(counters=counts, gauges=self.host.counters().gauges)
