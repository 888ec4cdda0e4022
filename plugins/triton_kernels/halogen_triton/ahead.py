"""Compiling for a device that is not here, by the very code that launches on one that is.

Triton's launcher asks its driver for the target and compiles what it has not got; here the driver
is a stand-in that names the target, and launches end when their kernel is compiled. Arguments are
meta tensors: true shapes, dtypes and sizes, no memory. So specialisation, options and cache key
are those of a real start on that device with the same Triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from halogen_core.spi import (
    BackendOptions,
    ConfigError,
    MemoryTier,
    QuantTensor,
    Replay,
    Sampled,
    StepBatch,
    StepMeta,
    WeightRole,
)
from halogen_triton import capture, interpreter
from halogen_triton.backend import TritonBackend
from halogen_triton.launch import tuning


def target_of(arch: str) -> GPUTarget:
    """Triton's name of an arch: `gfx1151` or `sm_90`."""
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return GPUTarget("hip", arch, 32)


@attrs.frozen
class StandIn:
    """What Triton's launcher asks of a driver before it launches."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """While inside, launches compile for `arch` and do not run."""
    run = JITFunction.run
    met: set[Any] = set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        met.add(self)
        return run(self, *args, grid=grid, warmup=True, **named)

    before = driver._active
    driver.set_active(StandIn(target_of(arch)))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run
        driver._active = before
        # what was compiled for a stand-in must not be launched by a real driver
        for kernel in met:
            kernel.device_caches.pop(0, None)


class AheadBackend(TritonBackend):
    """The Triton backend without a device: loading and steps compile, and compute nothing."""

    def __init__(self, options: BackendOptions, *, arch: str, name: str) -> None:
        if interpreter.active():
            raise ConfigError(
                "nothing is compiled while Triton's interpreter is on",
                code="HRT-3405",
                fix="unset TRITON_INTERPRET",
            )
        super().__init__(
            options,
            tuning=tuning(arch, options.cache_dir),
            device="meta",
            name=name,
            description=f"{arch}, compiled ahead without the device",
        )
        self._scope = contextlib.ExitStack()
        self._scope.enter_context(compiling_for(arch))

    def memory(self) -> tuple[MemoryTier, ...]:
        size = 1 << 40
        return (MemoryTier(name="device", total=size, free=size, source="no device: shapes only"),)

    def download(self, array: Tensor) -> NDArray[Any]:
        kind = np.float32 if array.is_floating_point() else np.int64
        return np.zeros(array.shape, kind)

    def fetch(self, sampled: Sampled[Tensor]) -> Callable[[], Sampled[NDArray[Any]]]:
        return lambda: Sampled(token_ids=self.download(sampled.token_ids))

    def synchronize(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        super().close()
        self._scope.close()

    def capture(
        self, step: Callable[[StepMeta[Tensor]], Sampled[Tensor]], batch: StepBatch
    ) -> Replay[Tensor] | None:
        key = self.capture_key(batch)
        if not isinstance(key, capture.CaptureKey) or self._trash is None:
            return None
        inputs = capture.StaticInputs(key, *self._trash, self.device)
        inputs.fill(batch)
        sampled = step(capture.static_meta(self.upload_step, inputs))
        return lambda batch: Sampled(token_ids=sampled.token_ids[: batch.num_sequences])

    def _dense(self, parts: Sequence[QuantTensor], role: WeightRole, dtype: torch.dtype) -> Tensor:
        axis = 1 if role is WeightRole.EXPERTS else 0
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        return torch.empty(shape, dtype=dtype, device="meta")
