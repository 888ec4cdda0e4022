"""The seam: all that a plugin may import from the core.

`TorchBackend` (every op in plain torch) is reached as `halogen_core.spi.TorchBackend` and loads
torch only then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halogen_core.errors import (
    BackendUnavailable,
    ConfigError,
    DeviceError,
    DeviceLost,
    HalogenError,
    ModelError,
    OutOfDeviceMemory,
    OutOfMemory,
    PluginError,
    SpiMismatch,
    Transient,
    UnsupportedOp,
)
from halogen_core.spi.abilities import (
    Adjustable,
    CompilesKernels,
    KernelCounts,
    KernelPack,
    RunsAhead,
    TakesKernels,
    Tunes,
)
from halogen_core.spi.arrays import Array
from halogen_core.spi.backend import Backend, Capabilities, Replay
from halogen_core.spi.conversions import Conversions
from halogen_core.spi.costs import LinearCost
from halogen_core.spi.float8 import (
    FLOAT8,
    check_float8,
    float8_halves,
    float8_rounding,
    float8_values,
)
from halogen_core.spi.formats import FORMATS, WeightFormat
from halogen_core.spi.hookspecs import ENTRY_POINT_GROUP, hookimpl
from halogen_core.spi.memory import (
    KV_ROW_BYTES,
    KVBlocks,
    KVCache,
    KVLayout,
    KVSpec,
    MemoryPlan,
    MemoryRequest,
    MemoryTier,
    PoolPlan,
    check_block_ids,
    check_kv_blocks,
    kv_block_shape,
    kv_row_bytes,
)
from halogen_core.spi.model import Checkpoint, DecoderConfig, LayerConfig
from halogen_core.spi.operations import (
    Activation,
    AttentionSpec,
    MoESpec,
    OpSignature,
    PackedWeight,
    Placement,
    QuantTensor,
    RopeSpec,
    RopeStyle,
    Support,
    SupportLevel,
    WeightRole,
)
from halogen_core.spi.ops import FUSED_OPS, OPS, Ops
from halogen_core.spi.records import (
    BackendOptions,
    BackendSpec,
    ConformanceExtras,
    Cost,
    DeviceInfo,
    DoctorContext,
    Finding,
    FormatSpec,
    Limits,
    OpImplementation,
    PolicySpec,
    ProbeContext,
    ProbeResult,
    Reason,
    Severity,
    StepShape,
    Telemetry,
)
from halogen_core.spi.refusals import pool_refusal
from halogen_core.spi.step import Carried, Sampled, SamplingBatch, StepBatch, StepMeta
from halogen_core.spi.weight_check import check_weight

if TYPE_CHECKING:
    from halogen_core.torch_backend import (
        HostFallbackBackend,
        HostFallbackOps,
        InvariantTorchOps,
        TorchBackend,
        TorchOps,
    )

SPI_VERSION = (1, 2)
"""Major, minor. Minor adds; major changes or removes. `api.lock` holds the signatures."""

_LAZY = dict.fromkeys(
    ("HostFallbackBackend", "HostFallbackOps", "InvariantTorchOps", "TorchBackend", "TorchOps"),
    "halogen_core.torch_backend",
)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")


__all__ = [
    "ENTRY_POINT_GROUP",
    "FLOAT8",
    "FORMATS",
    "FUSED_OPS",
    "KV_ROW_BYTES",
    "OPS",
    "SPI_VERSION",
    "Activation",
    "Adjustable",
    "Array",
    "AttentionSpec",
    "Backend",
    "BackendOptions",
    "BackendSpec",
    "BackendUnavailable",
    "Capabilities",
    "Carried",
    "Checkpoint",
    "CompilesKernels",
    "ConfigError",
    "ConformanceExtras",
    "Conversions",
    "Cost",
    "DecoderConfig",
    "DeviceError",
    "DeviceInfo",
    "DeviceLost",
    "DoctorContext",
    "Finding",
    "FormatSpec",
    "HalogenError",
    "HostFallbackBackend",
    "HostFallbackOps",
    "InvariantTorchOps",
    "KVBlocks",
    "KVCache",
    "KVLayout",
    "KVSpec",
    "KernelCounts",
    "KernelPack",
    "LayerConfig",
    "Limits",
    "LinearCost",
    "MemoryPlan",
    "MemoryRequest",
    "MemoryTier",
    "MoESpec",
    "ModelError",
    "OpImplementation",
    "OpSignature",
    "Ops",
    "OutOfDeviceMemory",
    "OutOfMemory",
    "PackedWeight",
    "Placement",
    "PluginError",
    "PolicySpec",
    "PoolPlan",
    "ProbeContext",
    "ProbeResult",
    "QuantTensor",
    "Reason",
    "Replay",
    "RopeSpec",
    "RopeStyle",
    "RunsAhead",
    "Sampled",
    "SamplingBatch",
    "Severity",
    "SpiMismatch",
    "StepBatch",
    "StepMeta",
    "StepShape",
    "Support",
    "SupportLevel",
    "TakesKernels",
    "Telemetry",
    "TorchBackend",
    "TorchOps",
    "Transient",
    "Tunes",
    "UnsupportedOp",
    "WeightFormat",
    "WeightRole",
    "check_block_ids",
    "check_float8",
    "check_kv_blocks",
    "check_weight",
    "float8_halves",
    "float8_rounding",
    "float8_values",
    "hookimpl",
    "kv_block_shape",
    "kv_row_bytes",
    "pool_refusal",
]
