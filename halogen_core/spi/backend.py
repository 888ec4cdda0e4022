"""The Backend protocol: what a device must be able to do, and the data it tells about itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import attrs
from numpy.typing import NDArray

from halogen_core.spi.arrays import Array
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
    WeightRole,
)
from halogen_core.spi.ops import Ops
from halogen_core.spi.records import Cost, Limits, StepShape, Telemetry
from halogen_core.spi.step import Sampled, StepBatch, StepMeta


@attrs.frozen(kw_only=True)
class Capabilities:
    """What the core may ask of a backend: data, so that nobody asks which vendor it is."""

    name: str
    device: str
    """For people: `cpu_reference:0 (2 threads)`, `rocm_strixhalo:0 (gfx1151)`."""
    compute_dtypes: tuple[str, ...]
    """Activation dtypes, preferred first: `f32`, `f16`, `bf16`."""
    weight_formats: Mapping[str, str] = attrs.field(factory=dict)
    """Format -> `native` (stays packed) or `emulated` (dequantised when packed)."""
    kv_dtypes: tuple[str, ...] = ("f16",)
    """KV storage types, preferred first."""
    kv_block_sizes: tuple[int, ...] = (16,)
    """Allowed tokens per block, preferred first."""
    head_dims: tuple[int, ...] = ()
    """Allowed head dims; empty: any."""
    graph_capture: bool = False
    max_context: int | None = None
    alignment: int = 1
    """Of weight buffers, bytes."""
    deterministic: bool = False
    """Same input, same bits, run after run."""
    batch_invariant: bool = False
    """A sequence's results do not depend on what shares its step or how it is chunked."""
    quantized_activations: bool = False
    """Activations are rounded to 8 bits before quantised weights (declared extra error)."""
    collectives: tuple[str, ...] = ()
    unified_memory: bool = False
    extra: Mapping[str, str] = attrs.field(factory=dict)


class Replay(Protocol[Array]):
    """A captured step; runs for every batch that has the same capture key."""

    def __call__(self, batch: StepBatch) -> Sampled[Array]:
        """Run the step on `batch`; returns what the captured function returned."""
        ...


class Backend(Protocol[Array]):
    """One device, opened. Created by `BackendSpec.factory(options)`, closed with `close()`.

    Raises the device errors of `halogen_core.spi`: `OutOfDeviceMemory`, `DeviceLost`, `Transient`.
    """

    @property
    def ops(self) -> Ops[Array]:
        """The op table, resolved once."""
        ...

    def capabilities(self) -> Capabilities: ...

    def supports(self, signature: OpSignature) -> Support:
        """Whether and where a call would run. Pure and value-free; yes and no are both promises."""
        ...

    def placement(self) -> tuple[Placement, ...]:
        """Where each op of `OPS` runs, with reasons for anything that is not native."""
        ...

    # -- memory
    def memory(self) -> tuple[MemoryTier, ...]: ...

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        """Divide memory; raises `OutOfMemory` with the arithmetic when it cannot fit."""
        ...

    # -- arrays
    def upload(self, host: NDArray[Any]) -> Array:
        """A device copy of a host array (int32, int64, uint32, float32, uint8)."""
        ...

    def download(self, array: Array) -> NDArray[Any]:
        """A host copy; synchronises. Floating arrays come back as float32."""
        ...

    def upload_step(self, batch: StepBatch) -> StepMeta[Array]:
        """One step's host arrays on the device, in as few transfers as the device likes."""
        ...

    def synchronize(self) -> None: ...

    def close(self) -> None:
        """Release everything; may be called twice."""
        ...

    # -- weights
    def pack(self, parts: Sequence[QuantTensor], role: WeightRole) -> PackedWeight[Array]:
        """Lay a weight out for this device; several parts are stacked along the output axis."""
        ...

    def unpack(self, weight: PackedWeight[Array]) -> NDArray[Any]:
        """The float32 values of a packed weight, for tests and export."""
        ...

    # -- KV
    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """The layout for `spec`; raises `ConfigError` for a block size or dtype it cannot do."""
        ...

    def kv_alloc(self, layout: KVLayout, num_blocks: int) -> KVCache:
        """A pool of `num_blocks` blocks, allocated now and for good."""
        ...

    def kv_copy(self, kv: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) within the pool, in order, all layers."""
        ...

    def kv_export(self, kv: KVCache, blocks: Sequence[int]) -> KVBlocks:
        """Blocks in canonical host form, bit-exact."""
        ...

    def kv_import(self, kv: KVCache, blocks: Sequence[int], data: KVBlocks) -> None:
        """Write canonical blocks; raises `ConfigError` if the spec differs."""
        ...

    # -- step capture
    def capture_key(self, batch: StepBatch) -> Hashable | None:
        """Which captured step could serve this batch; None: run it eagerly."""
        ...

    def capture(
        self, step: Callable[[StepMeta[Array]], Sampled[Array]], batch: StepBatch
    ) -> Replay[Array] | None:
        """Capture `step` for all batches with `capture_key(batch)`; padding is the backend's own
        business and is inert (its KV writes go to a reserved block). None: cannot, run eagerly.
        """
        ...

    # -- advice and telemetry
    def limits(self) -> Limits:
        """What a step may hold now. Asked about once a second while running, between steps, so it
        must be cheap; a device that throttles or runs short of memory lowers it, and raises it
        again later. A lowered limit holds from the next step on: who no longer fits pauses.
        """
        ...

    def cost(self, shape: StepShape) -> Cost | None:
        """Predicted time of a step; None until something is known."""
        ...

    def observe(self, shape: StepShape, seconds: float) -> None:
        """The core's measurement of a step, to calibrate `cost`."""
        ...

    def counters(self) -> Telemetry: ...
