"""Memory of an APU, told honestly.

The BIOS carve-out (VRAM) is gone from the host; GTT is host memory that the GPU may map. The driver
serves APU allocations from the larger of the two, so they are never added. What is usable from GTT
is the least of what GTT has left, what HIP says, and what the host can spare.
"""

from __future__ import annotations

import attrs

from halogen_core.spi import MemoryTier
from halogen_rocm.platform import PAGE, Gpu, Platform

GIB = 1 << 30
RESERVE = 6 * GIB
"""Left to the host: kernel, page cache, desktop."""
SEEN = 0.9
"""Share of the driver's memory that HIP sees where all is well."""
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
    if is_carve_out(gpu):
        return _carve_out(gpu, ledger, hip_free)
    return _gtt(platform, gpu, ledger, hip_free, reserve)


def is_carve_out(gpu: Gpu) -> bool:
    """Whether allocations come from memory that the host does not have."""
    return not gpu.is_strix_halo or gpu.vram_total > gpu.gtt_total


def hip_shortfall(gpu: Gpu, hip_total: int) -> str | None:
    """What to say when HIP sees much less than the driver gives; None: nothing."""
    total = gpu.vram_total if is_carve_out(gpu) else gpu.gtt_total
    if hip_total >= SEEN * total:
        return None
    return (
        f"HIP sees {hip_total / GIB:.1f} GiB of {total / GIB:.1f} GiB that the driver gives "
        "(plans go by the smaller); kernels before 6.16.9 and some nightly builds see a part only"
    )


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
    bounds |= _host_bounds(platform, gpu, ledger, reserve)
    if hip_free is not None:
        bounds["hipMemGetInfo"] = hip_free
    total = gpu.gtt_total
    if platform.mem_total is not None:
        total = min(total, platform.mem_total)
    least = min(bounds, key=lambda name: bounds[name])
    return MemoryTier(
        name="device",
        total=total,
        free=max(0, min(bounds.values())),
        shared_with_host=True,
        bandwidth=BANDWIDTH,
        granule=2 << 20,
        source=f"GTT: {_listed(bounds)}, bound by {least}",
    )


def host_tier(
    platform: Platform, gpu: Gpu, *, ledger: Ledger, reserve: int = RESERVE
) -> MemoryTier:
    """What the host can give; where GTT binds, it is more than the device can get."""
    bounds = _host_bounds(platform, gpu, ledger, reserve) or {"nothing known": 0}
    least = min(bounds, key=lambda name: bounds[name])
    return MemoryTier(
        name="host",
        total=platform.mem_total or 0,
        free=max(0, bounds[least]),
        shared_with_host=True,
        granule=PAGE,
        source=f"{_listed(bounds)}, bound by {least}",
    )


def _host_bounds(platform: Platform, gpu: Gpu, ledger: Ledger, reserve: int) -> dict[str, int]:
    held = 0 if is_carve_out(gpu) else max(gpu.gtt_used, ledger.device_bytes)
    bounds = {}
    if platform.mem_available is not None:
        hidden = max(0, held - gpu.gtt_used)
        bounds["MemAvailable - reserve"] = platform.mem_available - reserve - hidden
    if platform.mem_total is not None and held:
        # what the GPU holds may look like reclaimable cache, which MemAvailable counts as free
        bounds["MemTotal - GTT used - reserve"] = platform.mem_total - held - reserve
    if platform.cgroup_limit is not None:
        bounds["cgroup memory.max - current"] = platform.cgroup_limit - platform.cgroup_used
    return bounds


def _listed(bounds: dict[str, int]) -> str:
    return f"min({', '.join(f'{name} {value / GIB:.1f}' for name, value in bounds.items())}) GiB"
