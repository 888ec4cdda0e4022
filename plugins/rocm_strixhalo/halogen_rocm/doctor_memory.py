"""Doctor's rules on memory: carve-out, GTT, leaks, fragmentation, locking."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from halogen_core.spi import DoctorContext, Finding, MemoryTier, Severity
from halogen_rocm.findings import finding, found
from halogen_rocm.locking import engines
from halogen_rocm.memory import GIB, RESERVE, Ledger, device_tier, host_tier
from halogen_rocm.platform import PAGE, Gpu, Platform, text

LARGE_CARVE_OUT = 2 * GIB
CARVE_OUT = 512 << 20
"""What the BIOS keeps at least where it is told to."""
LEAK = 8 * GIB
HUGE = 2 << 20
SCATTERED = 0.1
"""Share of free memory that should lie in pages of 2 MiB."""


def memory_findings(context: DoctorContext, platform: Platform, gpu: Gpu) -> Iterator[Finding]:
    """Everything about memory."""
    yield from _memory(platform, gpu)
    yield from _leak(platform, gpu)
    yield from _fragmentation(context, platform)
    yield from _memlock(context, device_tier(platform, gpu, ledger=Ledger()).free)


def _memory(platform: Platform, gpu: Gpu) -> Iterator[Finding]:
    tier = device_tier(platform, gpu, ledger=Ledger())
    yield finding(
        "rocm.memory",
        Severity.OK,
        f"usable for models: {tier.free / GIB:.1f} GiB of {tier.total / GIB:.1f} GiB",
        seen=tier.source,
    )
    yield found("rocm.memory.host_tier", _host_tier(platform, gpu, tier))
    if gpu.vram_total > LARGE_CARVE_OUT:
        yield finding(
            "rocm.memory.carve_out",
            Severity.WARNING,
            f"the BIOS keeps {gpu.vram_total / GIB:.1f} GiB from the host as VRAM; GTT is "
            f"{gpu.gtt_total / GIB:.1f} GiB, and the two are never added",
            "set the UMA frame buffer to 512 MiB (not Auto)",
        )
    whole = _whole_memory(platform, gpu)
    if whole and gpu.gtt_total < 0.75 * whole:
        first = "after that " if gpu.vram_total > LARGE_CARVE_OUT else ""
        yield finding(
            "rocm.memory.gtt",
            Severity.WARNING,
            f"the GPU may map {gpu.gtt_total / GIB:.1f} of {whole / GIB:.1f} GiB",
            f"{first}boot with {pages_limit_advice(platform, gpu)}",
        )


def _whole_memory(platform: Platform, gpu: Gpu) -> int:
    """The host's memory once a large carve-out is given back; 0: not known."""
    returned = gpu.vram_total - CARVE_OUT if gpu.vram_total > LARGE_CARVE_OUT else 0
    return platform.mem_total + returned if platform.mem_total else 0


def asked_limits(platform: Platform) -> tuple[int, int]:
    """(`pages_limit` in pages, `gttsize` in MiB) of the kernel's command line; 0: not given."""

    def value(name: str) -> int:
        found = re.search(rf"(?<![\w.]){name}=(\d+)", platform.cmdline)
        return int(found[1]) if found else 0

    return value(r"(?:amd)?ttm\.pages_limit"), value(r"amdgpu\.gttsize")


def pages_limit_advice(platform: Platform, gpu: Gpu) -> str:
    """The limit to boot with: the larger one asked for where that is sane, else all but a reserve.

    Every rule advises the same.
    """
    whole = _whole_memory(platform, gpu)
    pages, megabytes = asked_limits(platform)
    asked = max(pages * PAGE, megabytes << 20)
    size = asked if 0.75 * whole <= asked <= whole else max(GIB, whole - RESERVE)
    gib = size // GIB
    return f"{platform.memory_module}.pages_limit={gib * 262144} ({gib} GiB x 262144)"


def _host_tier(platform: Platform, gpu: Gpu, device: MemoryTier) -> str:
    """What `--host-pool-size` would do on this machine."""
    host = host_tier(platform, gpu, ledger=Ledger())
    if not device.shared_with_host:
        return f"a host tier for KV is memory apart: up to {host.free / GIB:.1f} GiB, by copies"
    beyond = max(0, host.free - device.free)
    rest = f"; {beyond / GIB:.1f} GiB more are the host's alone, by copies" if beyond else ""
    return f"one memory: a host tier for KV is part of the KV pool and copies nothing{rest}"


def _leak(platform: Platform, gpu: Gpu) -> Iterator[Finding]:
    if gpu.gtt_used > LEAK and platform.gpu_processes == ():
        yield finding(
            "rocm.memory.leak",
            Severity.ERROR,
            f"{gpu.gtt_used / GIB:.1f} GiB of GTT are held and no process uses the GPU: a dead "
            "process left them",
            "reboot; the next model may hang while loading otherwise",
        )


def _fragmentation(context: DoctorContext, platform: Platform) -> Iterator[Finding]:
    """Device memory is given in 2 MiB pages: where there are few, a start compacts for minutes."""
    lines = text(Path(context.root, "proc/buddyinfo")).splitlines()
    whole = 0
    for line in lines:
        counts = [int(n) for n in line.partition("zone")[2].split()[1:]]
        whole += sum(count << (order + 12) for order, count in enumerate(counts) if order >= 9)
    available = platform.mem_available or 0
    if lines and whole < SCATTERED * available:
        yield finding(
            "rocm.memory.fragmented",
            Severity.WARNING,
            f"{whole / GIB:.1f} of {available / GIB:.1f} GiB lie in whole 2 MiB pages: loading may "
            "stall at 100 % of one core",
            "echo 1 > /proc/sys/vm/compact_memory before the start",
            f"{whole // HUGE} free pages of order 9 and more in /proc/buddyinfo",
        )


def _memlock(context: DoctorContext, usable: int) -> Iterator[Finding]:
    """The limit on locked memory, and what running engines have locked."""
    for process, (resident, locked) in sorted(engines(context.root).items()):
        share = f"{locked / GIB:.2f} GiB locked (VmLck) of {resident / GIB:.2f} GiB resident"
        yield found("rocm.memlock.engine", f"engine {process}: {share}")
    limit = _memlock_limit(context)
    if limit is not None and limit < usable:
        yield finding(
            "rocm.memlock",
            Severity.INFO,
            f"RLIMIT_MEMLOCK is {limit} bytes, {(usable - limit) / GIB:.1f} GiB less than models "
            "can use: swapping may stall steps",
            "LimitMEMLOCK=infinity in the systemd unit, or `memlock unlimited` in "
            "/etc/security/limits.conf; in a container --ulimit memlock=-1",
        )


def _memlock_limit(context: DoctorContext) -> int | None:
    """Bytes; None: unlimited or not to be read."""
    limits = text(Path(context.root, "proc/self/limits"))
    found = re.search(r"^Max locked memory\s+(\d+)", limits, flags=re.MULTILINE)
    return int(found.group(1)) if found else None
