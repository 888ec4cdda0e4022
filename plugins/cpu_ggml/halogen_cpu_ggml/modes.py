"""The two ways this backend works: our kernels in ggml graphs, or ggml's own ops alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.spi import (
    FLOAT8,
    FORMATS,
    OPS,
    Capabilities,
    ConfigError,
    KVLayout,
    KVSpec,
    Limits,
    OpSignature,
    Placement,
    Support,
    SupportLevel,
    WeightRole,
    kv_block_shape,
)
from halogen_cpu_ggml import kv_rows
from halogen_cpu_ggml.binding import Library
from halogen_cpu_ggml.inputs import StepInputs
from halogen_cpu_ggml.kv_rows import RowPool
from halogen_cpu_ggml.locking import do_nothing
from halogen_cpu_ggml.ops import GgmlOps
from halogen_cpu_ggml.reblock import REBLOCKED
from halogen_cpu_ggml.recorder import Recorder
from halogen_cpu_ggml.settings import Settings
from halogen_cpu_ggml.weights import Part

NATIVE_FORMATS = {n: "native" for n, f in FORMATS.items() if f.ggml_type is not None}
WEIGHT_FORMATS = (
    NATIVE_FORMATS | dict.fromkeys(REBLOCKED, "native") | dict.fromkeys(FLOAT8, "emulated")
)
"""Foreign ones are re-blocked once and then stay packed, 8-bit floats take 16 bits."""
BLOCK_SIZES = (16, 32, 64)
Q8_BLOCK = 32


class Mode(Protocol):
    """What differs between the two."""

    @property
    def ops(self) -> GgmlOps: ...
    @property
    def gathers(self) -> bool:
        """Attention gathers KV rows, so graphs depend on the KV length."""
        ...

    @property
    def reads_file(self) -> bool:
        """Every step reads the matrices where they lie in the model's file."""
        ...

    def capabilities(self, settings: Settings, lib: Library) -> Capabilities: ...
    def supports(self, signature: OpSignature) -> Support: ...
    def placement(self) -> tuple[Placement, ...]: ...
    def prepare(self, parts: tuple[Part, ...], role: WeightRole) -> None: ...
    def lock_with(self, hold: Callable[[NDArray[np.uint8]], None]) -> None:
        """What to do with the memory of weights."""
        ...

    def kv_layout(self, spec: KVSpec) -> KVLayout: ...
    def kv_pool(self, layout: KVLayout, num_blocks: int) -> Any: ...
    def before(self, inputs: StepInputs) -> None: ...
    def limits(self) -> Limits: ...


@attrs.define(eq=False)
class GgmlMode:
    """ggml's own ops."""

    recorder: Recorder
    reason: str = "our kernels are switched off or not built; ggml's own ops run"
    ops: GgmlOps = attrs.field(init=False)
    gathers: bool = True
    reads_file: bool = True
    hold: Callable[[NDArray[np.uint8]], None] = do_nothing

    def __attrs_post_init__(self) -> None:
        self.ops = GgmlOps(self.recorder)

    def capabilities(self, settings: Settings, lib: Library) -> Capabilities:
        return Capabilities(
            name="cpu_ggml",
            device=f"cpu_ggml:0 ({settings.threads} threads, ggml {lib.version})",
            compute_dtypes=("f32",),
            weight_formats=WEIGHT_FORMATS,
            kv_dtypes=("f16", "q8_0", "bf16", "f32"),
            kv_block_sizes=BLOCK_SIZES,
            graph_capture=True,
            deterministic=True,
            quantized_activations=True,
            unified_memory=True,
            extra={"kernels": self.reason},
        )

    def supports(self, signature: OpSignature) -> Support:
        reasons = tuple(refusals(signature, tuple(kv_rows.GGML_TYPE)))
        level = SupportLevel.NO if reasons else SupportLevel.NATIVE
        return Support(level=level, reasons=reasons)

    def placement(self) -> tuple[Placement, ...]:
        native = SupportLevel.NATIVE
        slow = {"attention": (self.reason, "KV is gathered and attended to under a mask")}
        return tuple(
            Placement(op=op, level=native, implementation="ggml", reasons=slow.get(op, ()))
            for op in OPS
        )

    def prepare(self, parts: tuple[Part, ...], role: WeightRole) -> None:
        """Weights are read as they lie in the file; of a table only rows are."""
        for part in parts if role is not WeightRole.EMBEDDING else ():
            self.hold(part.data)

    def lock_with(self, hold: Callable[[NDArray[np.uint8]], None]) -> None:
        self.hold = hold

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        check_kv(spec, tuple(kv_rows.GGML_TYPE))
        size = int(np.prod(kv_block_shape(spec, 1)))
        return KVLayout(spec=spec, id=kv_rows.LAYOUT, bytes_per_block=size, alignment=64)

    def kv_pool(self, layout: KVLayout, num_blocks: int) -> RowPool:
        return RowPool.allocate(layout, num_blocks)

    def before(self, inputs: StepInputs) -> None:
        """Nothing to lay ready."""

    def limits(self) -> Limits:
        return Limits()


def refusals(signature: OpSignature, kv_dtypes: tuple[str, ...]) -> list[str]:
    """Why a call cannot run, empty if it can."""
    if signature.op not in OPS:
        return [f"there is no op `{signature.op}`"]
    out = []
    if signature.dtype != "f32":
        out.append(f"activations are f32, not {signature.dtype}")
    if signature.weight_format not in (None, *WEIGHT_FORMATS):
        out.append(f"weight format {signature.weight_format} is not one of ggml's here")
    if signature.kv_dtype not in (None, *kv_dtypes):
        out.append(f"KV dtype {signature.kv_dtype} is not one of {', '.join(kv_dtypes)}")
    if signature.block_size not in (None, *BLOCK_SIZES):
        out.append(f"KV block size {signature.block_size} is not one of {BLOCK_SIZES}")
    attention = signature.attention
    if attention is not None and attention.num_heads % attention.num_kv_heads:
        out.append("query heads must be a multiple of KV heads")
    moe = signature.moe
    if moe is not None and moe.top_k > moe.num_experts:
        out.append(f"top-{moe.top_k} of {moe.num_experts} experts")
    if signature.kv_dtype == "q8_0" and attention and attention.head_dim % Q8_BLOCK:
        out.append(f"q8_0 KV needs a head dim of whole blocks of {Q8_BLOCK}")
    return out


def check_kv(spec: KVSpec, dtypes: tuple[str, ...]) -> None:
    """Raises ConfigError (HRT-3609) for a layout that cannot be."""
    if spec.dtype not in dtypes:
        raise ConfigError(
            f"KV dtype is `{spec.dtype}`; cpu_ggml stores {', '.join(dtypes)}", code="HRT-3609"
        )
    if spec.block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"cache.block_size is {spec.block_size}; cpu_ggml supports 16, 32, 64",
            code="HRT-3609",
            fix="set one of these in halogen.toml or with --block-size",
        )
    if spec.dtype == "q8_0" and spec.head_dim % Q8_BLOCK:
        raise ConfigError(
            f"q8_0 KV needs a head dim of whole blocks of {Q8_BLOCK}, not {spec.head_dim}",
            code="HRT-3609",
            fix="use f16 KV",
        )
