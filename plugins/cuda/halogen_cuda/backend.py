"""`CudaBackend`: the Triton backend on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halogen_core.spi import (
    BackendOptions,
    BackendUnavailable,
    ConfigError,
    KVCache,
    KVLayout,
    MemoryTier,
    OutOfDeviceMemory,
    PackedWeight,
    QuantTensor,
    Telemetry,
    WeightRole,
)
from halogen_triton.ahead import AheadBackend
from halogen_triton.backend import TritonBackend
from halogen_triton.launch import tuning


def create(options: BackendOptions) -> CudaBackend:
    """The factory named in the backend's spec."""
    return CudaBackend(options, index=device_index(options.device))


def create_ahead(options: BackendOptions) -> AheadBackend:
    """A backend that compiles for a GPU that is not here: `--device cuda:sm_90` (the default)."""
    _, _, arch = (options.device or "").partition(":")
    if arch and not arch.removeprefix("sm_").isdigit():
        raise ConfigError(
            f"device is `{options.device}`; compiling ahead takes an arch like `cuda:sm_90`",
            code="HRT-3410",
            fix="check --device",
        )
    return AheadBackend(options, arch=arch or "sm_90", name="cuda")


def device_index(device: str | None) -> int:
    """The number in `cuda:N`."""
    _, _, number = (device or "cuda:0").partition(":")
    if number and not number.isdigit():
        raise ConfigError(
            f"device is `{device}`; allowed is `cuda` or `cuda:N`",
            code="HRT-3410",
            fix="check --device",
        )
    return int(number or 0)


class CudaBackend(TritonBackend):
    """One NVIDIA GPU."""

    def __init__(self, options: BackendOptions, *, index: int = 0) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= count:
            raise BackendUnavailable(
                f"device `cuda:{index}` does not exist",
                reasons=[f"torch sees {count} CUDA devices"],
                fix="see `halogen plugins list` and CUDA_VISIBLE_DEVICES",
            )
        torch.cuda.set_device(index)
        properties = torch.cuda.get_device_properties(index)
        arch = f"sm_{properties.major}{properties.minor}"
        self.index = index
        super().__init__(
            options,
            tuning=tuning(arch, options.cache_dir),
            device=f"cuda:{index}",
            name="cuda",
            description=f"cuda:{index} ({properties.name}, {arch})",
        )

    def memory(self) -> tuple[MemoryTier, ...]:
        free, total = torch.cuda.mem_get_info(self.index)
        # what torch holds and does not use can be had too
        cached = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        device = MemoryTier(
            name="device",
            total=total,
            free=free + cached,
            reclaimable=cached,
            granule=2 << 20,
            source="cudaMemGetInfo; torch's cache",
        )
        return (device, *super().memory())

    def pack(self, parts: Sequence[QuantTensor], role: WeightRole) -> PackedWeight[Tensor]:
        try:
            return super().pack(parts, role)
        except torch.OutOfMemoryError as exc:
            asked = sum(part.data.nbytes for part in parts)
            raise self._out_of_memory("static", asked) from exc

    def kv_alloc(self, layout: KVLayout, num_blocks: int) -> KVCache:
        try:
            return super().kv_alloc(layout, num_blocks)
        except torch.OutOfMemoryError as exc:
            asked = layout.bytes_per_block * (num_blocks + 1)
            raise self._out_of_memory("dynamic", asked) from exc

    def counters(self) -> Telemetry:
        own = super().counters()
        gauges: dict[str, Any] = {
            "device_allocated_bytes": float(torch.cuda.memory_allocated(self.index)),
            "device_peak_bytes": float(torch.cuda.max_memory_allocated(self.index)),
        }
        return Telemetry(counters=own.counters, gauges={**own.gauges, **gauges})

    def close(self) -> None:
        super().close()
        torch.cuda.empty_cache()

    def _out_of_memory(self, pool: str, asked: int) -> OutOfDeviceMemory:
        return OutOfDeviceMemory(
            pool,
            asked=asked,
            free=self.memory()[0].free,
            fix="lower --max-context or --pool-size, or choose a smaller kv dtype or model",
        )
