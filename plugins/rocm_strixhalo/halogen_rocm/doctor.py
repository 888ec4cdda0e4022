"""`halogen doctor` on a Strix Halo: rules over files, so that a copied tree can be judged too.

No rule ever advises to switch thermal protection off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from halogen_core.spi import DoctorContext, Finding, Severity
from halogen_rocm.locking import locked_bytes
from halogen_rocm.memory import GIB, RESERVE, Ledger, device_tier
from halogen_rocm.platform import PAGE, Gpu, Platform, read_platform, text

LARGE_CARVE_OUT = 2 * GIB
LEAK = 8 * GIB
FULL_CLOCK_MHZ = 2900


def findings(context: DoctorContext) -> Iterator[Finding]:
    """Everything about AMD GPUs here; nothing where there is none."""
    platform = read_platform(context.root)
    if not platform.gpus:
        return
    gpu = platform.strix_halo
    if gpu is None:
        yield from _other_gpus(platform)
        return
    yield _found("rocm.gpu", f"Strix Halo: {gpu.card}, {gpu.arch}, PCI 1002:{gpu.device_id:04x}")
    yield from _nodes(platform)
    yield from _kernel(platform)
    yield from _firmware(context)
    yield from _override(context.environment)
    yield from _cmdline(platform)
    yield from _memory(platform, gpu)
    yield from _leak(platform, gpu)
    yield from _clocks(gpu)
    yield from _thermal(gpu)
    if context.live:
        yield from _memlock()


def _finding(code: str, severity: Severity, what: str, fix: str = "", seen: str = "") -> Finding:
    return Finding(code=code, severity=severity, text=what, fix=fix, evidence=seen)


def _found(code: str, what: str) -> Finding:
    return _finding(code, Severity.OK, what)


def _other_gpus(platform: Platform) -> Iterator[Finding]:
    for gpu in platform.gpus:
        yield _finding(
            "rocm.gpu",
            Severity.INFO,
            f"{gpu.card} is {gpu.arch} (PCI 1002:{gpu.device_id:04x}), not a Strix Halo (gfx1151); "
            "its memory is its own, not the host's",
            "`rocm_strixhalo` does not run on it; choose another backend",
        )


def _nodes(platform: Platform) -> Iterator[Finding]:
    if not platform.has_kfd or not platform.render_nodes:
        missing = "/dev/kfd" if not platform.has_kfd else "/dev/dri/renderD*"
        yield _finding(
            "rocm.nodes",
            Severity.ERROR,
            f"{missing} does not exist",
            "load amdgpu; in a container pass --device /dev/kfd --device /dev/dri with the groups "
            "render and video (podman: --group-add keep-groups)",
        )
    else:
        yield _found("rocm.nodes", f"/dev/kfd and {', '.join(platform.render_nodes)} exist")


def _kernel(platform: Platform) -> Iterator[Finding]:
    numbers = tuple(int(n) for n in re.findall(r"\d+", platform.kernel)[:3])
    if len(numbers) < 3:
        return
    seen = f"uname -r: {platform.kernel}"
    if numbers < (6, 16, 9):
        yield _finding(
            "rocm.kernel",
            Severity.ERROR,
            f"kernel {platform.kernel} lets ROCm see about 15.5 GB only",
            "install kernel 6.18.4 or newer",
            seen,
        )
    elif numbers < (6, 18, 4) and "amdgpu.cwsr_enable=0" not in platform.cmdline:
        yield _finding(
            "rocm.kernel",
            Severity.WARNING,
            f"kernel {platform.kernel} saves too few registers on a context switch: page faults",
            "install kernel 6.18.4 or newer, or boot with amdgpu.cwsr_enable=0",
            seen,
        )
    elif numbers[:2] == (7, 0):
        yield _finding(
            "rocm.kernel",
            Severity.WARNING,
            f"kernel {platform.kernel}: GPU reads of memory maps are about 300 times slower",
            "halogen reads weights without maps; other programs may hang: install 7.1 or newer",
            seen,
        )
    else:
        yield _found("rocm.kernel", f"kernel {platform.kernel}")


def _firmware(context: DoctorContext) -> Iterator[Finding]:
    for info in Path(context.root, "sys/kernel/debug/dri").glob("*/amdgpu_firmware_info"):
        found = re.search(r"MES .*?firmware version: 0x([0-9a-f]+)", text(info))
        if not found:
            continue
        version = int(found.group(1), 16) & 0xFF
        bad = version == 0x83
        yield _finding(
            "rocm.firmware",
            Severity.ERROR if bad else Severity.OK,
            f"MES firmware 0x{version:x}" + (" hangs under load" if bad else ""),
            "install linux-firmware 20260110 or newer (20251125 is broken)" if bad else "",
        )
        return


def _override(environment: Mapping[str, str]) -> Iterator[Finding]:
    value = environment.get("HSA_OVERRIDE_GFX_VERSION")
    if value is None:
        yield _found("rocm.override", "HSA_OVERRIDE_GFX_VERSION is not set")
    elif value == "11.5.1":
        yield _finding(
            "rocm.override",
            Severity.WARNING,
            "HSA_OVERRIDE_GFX_VERSION=11.5.1 says what the GPU is anyway",
            "unset it",
        )
    else:
        yield _finding(
            "rocm.override",
            Severity.ERROR,
            f"HSA_OVERRIDE_GFX_VERSION={value} runs code for another chip: faults and wrong "
            "results",
            "unset it; gfx1151 is supported natively",
        )


def _cmdline(platform: Platform) -> Iterator[Finding]:
    line = platform.cmdline
    pages = _parameter(line, r"(?:amd)?ttm\.pages_limit")
    megabytes = _parameter(line, r"amdgpu\.gttsize")
    if pages and megabytes and abs(pages * PAGE - (megabytes << 20)) > GIB:
        yield _finding(
            "rocm.cmdline.gtt",
            Severity.ERROR,
            f"ttm.pages_limit={pages} is {pages * PAGE / GIB:.1f} GiB, "
            f"amdgpu.gttsize={megabytes} is "
            f"{megabytes / 1024:.1f} GiB: one of them has a wrong digit",
            f"keep ttm.pages_limit={megabytes * 256} alone (GiB x 262144)",
            line,
        )
    elif megabytes:
        yield _finding(
            "rocm.cmdline.gtt",
            Severity.INFO,
            "amdgpu.gttsize is deprecated",
            "use ttm.pages_limit (GiB x 262144)",
            line,
        )
    if re.search(r"\bamd_iommu=pt\b", line):
        yield _finding(
            "rocm.cmdline.iommu",
            Severity.WARNING,
            "amd_iommu=pt is no value of that option; the kernel ignores it",
            "write iommu=pt, or amd_iommu=off",
            line,
        )
    elif "amd_iommu=off" not in line:
        yield _finding(
            "rocm.cmdline.iommu",
            Severity.INFO,
            "the IOMMU is on: prefill is 5 to 16 % slower",
            "amd_iommu=off gains that and takes the NPU away",
        )
    if "amdttm" in platform.modules and "ttm" not in platform.modules and "ttm.pages" in line:
        yield _finding(
            "rocm.cmdline.module",
            Severity.WARNING,
            "this kernel's module is amdttm: ttm.pages_limit has no effect",
            "use amdttm.pages_limit",
            line,
        )


def _parameter(line: str, name: str) -> int:
    found = re.search(rf"(?<![\w.]){name}=(\d+)", line)
    return int(found.group(1)) if found else 0


def _memory(platform: Platform, gpu: Gpu) -> Iterator[Finding]:
    tier = device_tier(platform, gpu, ledger=Ledger())
    yield _finding(
        "rocm.memory",
        Severity.OK,
        f"usable for models: {tier.free / GIB:.1f} GiB of {tier.total / GIB:.1f} GiB",
        seen=tier.source,
    )
    if gpu.vram_total > LARGE_CARVE_OUT:
        yield _finding(
            "rocm.memory.carve_out",
            Severity.WARNING,
            f"the BIOS keeps {gpu.vram_total / GIB:.1f} GiB from the host as VRAM; GTT is "
            f"{gpu.gtt_total / GIB:.1f} GiB, and the two are never added",
            "set the UMA frame buffer to 512 MiB (not Auto) and raise ttm.pages_limit",
        )
    if platform.mem_total and gpu.gtt_total < 0.75 * platform.mem_total:
        wanted = max(1, int((platform.mem_total - RESERVE) / GIB))
        yield _finding(
            "rocm.memory.gtt",
            Severity.WARNING,
            f"the GPU may map {gpu.gtt_total / GIB:.1f} of {platform.mem_total / GIB:.1f} GiB",
            f"boot with ttm.pages_limit={wanted * 262144} ({wanted} GiB x 262144)",
        )


def _leak(platform: Platform, gpu: Gpu) -> Iterator[Finding]:
    if gpu.gtt_used > LEAK and platform.gpu_processes == ():
        yield _finding(
            "rocm.memory.leak",
            Severity.ERROR,
            f"{gpu.gtt_used / GIB:.1f} GiB of GTT are held and no process uses the GPU: a dead "
            "process left them",
            "reboot; the next model may hang while loading otherwise",
        )


def _clocks(gpu: Gpu) -> Iterator[Finding]:
    levels = [int(n) for n in re.findall(r"(\d+)Mhz", text(gpu.path / "pp_dpm_sclk"))]
    if levels and max(levels) < FULL_CLOCK_MHZ:
        yield _finding(
            "rocm.clocks",
            Severity.WARNING,
            f"the GPU's highest clock is {max(levels)} MHz, not {FULL_CLOCK_MHZ}",
            "set the platform profile to performance; a clock stuck at 900 MHz needs a cold boot",
        )
    level = text(gpu.path / "power_dpm_force_performance_level").strip()
    if level and level not in ("auto", "high"):
        yield _finding(
            "rocm.clocks.level",
            Severity.WARNING,
            f"power_dpm_force_performance_level is {level}",
            "write auto to it",
        )


def _thermal(gpu: Gpu) -> Iterator[Finding]:
    for file in gpu.path.glob("hwmon/hwmon*/temp1_input"):
        value = text(file).strip()
        if value.lstrip("-").isdigit() and int(value) >= 95000:
            yield _finding(
                "rocm.thermal",
                Severity.WARNING,
                f"the GPU is at {int(value) / 1000:.0f} °C and will throttle",
                "improve the airflow, or cap the clock at 2400 MHz: decode stays nearly as fast",
            )


def _memlock() -> Iterator[Finding]:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < GIB:
        yield _finding(
            "rocm.memlock",
            Severity.INFO,
            f"RLIMIT_MEMLOCK is {soft} bytes: the working set cannot be locked",
            "LimitMEMLOCK=infinity in the systemd unit, or --ulimit memlock=-1",
            f"VmLck is {locked_bytes()} bytes",
        )
