"""Memory of an APU, told honestly.

The BIOS carve-out (VRAM) is gone from the host; GTT is host memory that the GPU may map. The driver
serves APU allocations from the larger of the two, so they are never added. What is usable from GTT
is the least of what GTT has left, what HIP says, and what the host can spare.
"""

from __future__ import annotations

import attrs

from halogen_core.spi import MemoryTier
from halogen_rocm.platform import Gpu, Platform

GIB = 1 << 30
RESERVE = 6 * GIB
"""Left to the host: kernel, page cache, desktop."""
BANDWIDTH = 215e9
"""Bytes per second that large reads get for sure on LPDDR5X-8000 (peak 256e9)."""


@attrs.frozen(kw_only=True)
class Ledger:
    """What we hold ourselves; the driver's own counters stay at zero on some machines."""

    device_bytes: int = 0


def device_tier(
    platform: Platform,
    gpu: Gpu,
    *,
    ledger: Ledger,
    hip_free: int | None = None,
    reserve: int = RESERVE,
) -> MemoryTier:
    """What allocations of device memory can really get."""
    if not gpu.is_strix_halo or gpu.vram_total > gpu.gtt_total:
        return _carve_out(gpu, ledger, hip_free)
    return _gtt(platform, gpu, ledger, hip_free, reserve)


def _carve_out(gpu: Gpu, ledger: Ledger, hip_free: int | None) -> MemoryTier:
    free = gpu.vram_total - max(gpu.vram_used, ledger.device_bytes)
    sources = ["mem_info_vram_total - used"]
    if hip_free is not None:
        free = min(free, hip_free)
        sources.append("hipMemGetInfo")
    return MemoryTier(
        name="device",
        total=gpu.vram_total,
        free=max(0, free),
        shared_with_host=False,
        bandwidth=BANDWIDTH if gpu.is_strix_halo else None,
        granule=2 << 20,
        source=f"carve-out: min({', '.join(sources)})",
    )


def _gtt(
    platform: Platform, gpu: Gpu, ledger: Ledger, hip_free: int | None, reserve: int
) -> MemoryTier:
    bounds = {"gtt_total - gtt_used": gpu.gtt_total - max(gpu.gtt_used, ledger.device_bytes)}
    if platform.mem_available is not None:
        # weights that the GPU holds look like reclaimable cache: MemAvailable counts them as free
        hidden = max(0, ledger.device_bytes - gpu.gtt_used)
        bounds["MemAvailable - reserve"] = platform.mem_available - reserve - hidden
    if platform.cgroup_limit is not None:
        bounds["cgroup memory.max - current"] = platform.cgroup_limit - platform.cgroup_used
    if hip_free is not None:
        bounds["hipMemGetInfo"] = hip_free
    total = gpu.gtt_total
    if platform.mem_total is not None:
        total = min(total, platform.mem_total)
    least = min(bounds, key=lambda name: bounds[name])
    listed = ", ".join(f"{name} {value / GIB:.1f}" for name, value in bounds.items())
    return MemoryTier(
        name="device",
        total=total,
        free=max(0, min(bounds.values())),
        shared_with_host=True,
        bandwidth=BANDWIDTH,
        granule=2 << 20,
        source=f"GTT: min({listed}) GiB, bound by {least}",
    )
