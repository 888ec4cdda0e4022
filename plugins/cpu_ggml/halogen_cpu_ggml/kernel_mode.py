"""Our kernels in ggml graphs: what that mode can do and where its ops run."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.spi import (
    OPS,
    Capabilities,
    KVLayout,
    KVSpec,
    Limits,
    OpSignature,
    Placement,
    Support,
    SupportLevel,
    WeightRole,
)
from halogen_cpu_ggml import kv_tiles, native
from halogen_cpu_ggml.binding import Library, refuse
from halogen_cpu_ggml.inputs import StepInputs
from halogen_cpu_ggml.kernel_ops import KernelOps
from halogen_cpu_ggml.kv_tiles import TilePool
from halogen_cpu_ggml.modes import BLOCK_SIZES, WEIGHT_FORMATS, check_kv, refusals
from halogen_cpu_ggml.native import Crew
from halogen_cpu_ggml.recorder import Recorder
from halogen_cpu_ggml.settings import Settings
from halogen_cpu_ggml.weights import Part

KV_DTYPES = ("f16", "q8_0", "bf16", "f32", "f8_e5m2")
BY_GGML = ("embed", "add")


@attrs.define(eq=False)
class KernelMode:
    """Kernels of one instruction set."""

    ops: KernelOps
    gathers: bool = False
    reads_file: bool = False

    @classmethod
    def open(cls, settings: Settings, recorder: Recorder) -> KernelMode | None:
        """None: switched off, or `auto` and not built.

        Raises BackendUnavailable (HRT-3614): the instruction set asked for is not to be had.
        """
        if settings.kernels == "off":
            return None
        kernels = native.kernels(settings.kernels)
        if kernels is None:
            if settings.kernels == "auto":
                return None
            raise refuse(
                "HRT-3614",
                f"kernels is `{settings.kernels}`; this CPU lacks it or it was not built, "
                f"{', '.join(['auto', *native.runnable(), 'off'])} are possible here",
                "set kernels=auto",
            )
        team = recorder.team
        team.crew = Crew.start(kernels, team.threads, team.cpus)
        return cls(KernelOps(recorder, kernels))

    def capabilities(self, settings: Settings, lib: Library) -> Capabilities:
        isa = self.ops.kernels.isa
        return Capabilities(
            name="cpu_ggml",
            device=f"cpu_ggml:0 ({settings.threads} threads, ggml {lib.version}, {isa} kernels)",
            compute_dtypes=("f32",),
            weight_formats=WEIGHT_FORMATS,
            kv_dtypes=KV_DTYPES,
            kv_block_sizes=BLOCK_SIZES,
            graph_capture=True,
            deterministic=True,
            batch_invariant=True,
            quantized_activations=True,
            unified_memory=True,
            extra={"kernels": isa},
        )

    def supports(self, signature: OpSignature) -> Support:
        reasons = refusals(signature, KV_DTYPES)
        attention = signature.attention
        if attention is not None and attention.head_dim > native.LONGEST_HEAD:
            reasons.append(f"head dim is at most {native.LONGEST_HEAD}")
        level = SupportLevel.NO if reasons else SupportLevel.NATIVE
        return Support(level=level, reasons=tuple(reasons))

    def placement(self) -> tuple[Placement, ...]:
        isa = self.ops.kernels.isa
        return tuple(
            Placement(
                op=op,
                level=SupportLevel.NATIVE,
                implementation="ggml" if op in BY_GGML else f"{isa} kernel",
            )
            for op in OPS
        )

    def prepare(self, parts: tuple[Part, ...], role: WeightRole) -> None:
        """Matrices are laid out now; a tied embedding when its logits are first wanted."""
        if role is not WeightRole.EMBEDDING:
            for part in parts:
                self.ops.tiles(part)

    def lock_with(self, hold: Callable[[NDArray[np.uint8]], None]) -> None:
        self.ops.slabs.hold = hold

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        check_kv(spec, KV_DTYPES)
        size = kv_tiles.block_bytes(spec)
        return KVLayout(spec=spec, id=kv_tiles.LAYOUT, bytes_per_block=size, alignment=64)

    def kv_pool(self, layout: KVLayout, num_blocks: int) -> TilePool:
        return TilePool.allocate(layout, num_blocks)

    def before(self, inputs: StepInputs) -> None:
        """Workspace for split attention."""
        self.ops.workspace(inputs)

    def limits(self) -> Limits:
        return Limits()
