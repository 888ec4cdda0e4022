"""`halogen doctor` on a Strix Halo: rules over files, so that a copied tree can be judged too.

No rule ever advises to switch thermal protection off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from halogen_core.spi import DoctorContext, Finding, Severity
from halogen_rocm.doctor_memory import asked_limits, memory_findings, pages_limit_advice
from halogen_rocm.doctor_power import power_findings
from halogen_rocm.doctor_software import software_findings
from halogen_rocm.findings import finding, found
from halogen_rocm.memory import GIB
from halogen_rocm.platform import GFX1151, PAGE, STRIX_HALO, Gpu, Platform, read_platform, text
from halogen_rocm.probe import hidden_gpu

SIMDS = 80
"""Two in each of 40 compute units."""
HARMFUL = ("amdgpu.vm_update_mode=", "amdgpu.noretry=", "amdgpu.sg_display=0")
BROKEN_FIRMWARE = "20251125"


def findings(context: DoctorContext) -> Iterator[Finding]:
    """Everything about AMD GPUs here; nothing where there is none."""
    platform = read_platform(context.root)
    gpu = platform.strix_halo
    if gpu is None:
        yield from _hidden(platform)
        yield from _other_gpus(platform)
        return
    yield from _chip(gpu)
    yield from _nodes(platform)
    yield from _kernel(platform)
    yield from _firmware(context)
    yield from _override(context)
    yield from _cmdline(platform, gpu)
    yield from software_findings(context)
    yield from memory_findings(context, platform, gpu)
    yield from power_findings(context, platform, gpu)


def _chip(gpu: Gpu) -> Iterator[Finding]:
    what = f"Strix Halo: {gpu.card}, {gpu.arch}, PCI 1002:{gpu.device_id:04x}"
    if gpu.gfx is not None and gpu.gfx != GFX1151 and gpu.device_id == STRIX_HALO[1]:
        yield finding(
            "rocm.gpu",
            Severity.ERROR,
            f"the kernel driver says {gpu.arch} of a chip that is gfx1151 (PCI 1002:1586)",
            "install another kernel: code for the wrong chip gives wrong results",
        )
    elif gpu.simd_count is not None and gpu.simd_count != SIMDS:
        units = f"{gpu.simd_count // 2} compute units, not 40: launches are chosen for 40"
        yield finding("rocm.gpu", Severity.INFO, f"{what}; {units}", "expect less of prefill")
    else:
        yield found("rocm.gpu", what)


def _hidden(platform: Platform) -> Iterator[Finding]:
    """A chip whose GPU nobody can use: silence would look as if all were well."""
    if reason := hidden_gpu(platform):
        severity = Severity.ERROR if reason.code == "no_driver" else Severity.WARNING
        yield finding("rocm.gpu.hidden", severity, reason.text, reason.hint)


def _other_gpus(platform: Platform) -> Iterator[Finding]:
    for gpu in platform.gpus:
        why = "its memory is its own, not the host's"
        if gpu.arch.startswith("gfx115"):
            why = "it has fewer registers per SIMD, so kernels for gfx1151 are not for it"
        yield finding(
            "rocm.gpu",
            Severity.INFO,
            f"{gpu.card} is {gpu.arch} (PCI 1002:{gpu.device_id:04x}), not a Strix Halo (gfx1151); "
            f"{why}",
            "`rocm_strixhalo` does not run on it; choose another backend",
        )


def _nodes(platform: Platform) -> Iterator[Finding]:
    if not platform.has_kfd or not platform.render_nodes:
        missing = "/dev/kfd" if not platform.has_kfd else "/dev/dri/renderD*"
        yield finding(
            "rocm.nodes",
            Severity.ERROR,
            f"{missing} does not exist",
            "load amdgpu; in a container pass --device /dev/kfd --device /dev/dri with the groups "
            "render and video (podman: --group-add keep-groups)",
        )
    else:
        yield found("rocm.nodes", f"/dev/kfd and {', '.join(platform.render_nodes)} exist")


def _kernel(platform: Platform) -> Iterator[Finding]:
    numbers = tuple(int(n) for n in re.findall(r"\d+", platform.kernel)[:3])
    if len(numbers) < 3:
        return
    seen = f"uname -r: {platform.kernel}"
    if numbers < (6, 16, 9):
        yield finding(
            "rocm.kernel",
            Severity.ERROR,
            f"kernel {platform.kernel} lets ROCm see about 15.5 GB only",
            "install kernel 6.18.4 or newer",
            seen,
        )
    elif numbers < (6, 18, 4) and "amdgpu.cwsr_enable=0" not in platform.cmdline:
        yield finding(
            "rocm.kernel",
            Severity.WARNING,
            f"kernel {platform.kernel} saves too few registers on a context switch: page faults",
            "install kernel 6.18.4 or newer, or boot with amdgpu.cwsr_enable=0",
            seen,
        )
    elif numbers[:2] == (7, 0):
        yield finding(
            "rocm.kernel",
            Severity.WARNING,
            f"kernel {platform.kernel}: GPU reads of memory maps are about 300 times slower",
            "halogen reads weights without maps; other programs may hang: install 7.1 or newer",
            seen,
        )
    else:
        yield found("rocm.kernel", f"kernel {platform.kernel}")


def _firmware(context: DoctorContext) -> Iterator[Finding]:
    yield from _firmware_packages(context)
    for info in Path(context.root, "sys/kernel/debug/dri").glob("*/amdgpu_firmware_info"):
        told = re.search(r"MES .*?firmware version: 0x([0-9a-f]+)", text(info))
        if not told:
            continue
        version = int(told.group(1), 16) & 0xFF
        bad = version == 0x83
        yield finding(
            "rocm.firmware",
            Severity.ERROR if bad else Severity.OK,
            f"MES firmware 0x{version:x}" + (" hangs under load" if bad else ""),
            "install linux-firmware 20260110 or newer (20251125 is broken)" if bad else "",
        )
        return


def _firmware_packages(context: DoctorContext) -> Iterator[Finding]:
    packages = text(Path(context.root, "var/lib/dpkg/status"))
    version = re.search(
        r"^Package: linux-firmware\n(?:.+\n)*?Version: (\S+)", packages, re.MULTILINE
    )
    if version and BROKEN_FIRMWARE in version.group(1):
        yield finding(
            "rocm.firmware.package",
            Severity.ERROR,
            f"package linux-firmware {version.group(1)} is broken on this chip",
            "install linux-firmware 20260110 or newer",
        )
    if re.search(r"^Package: amdgpu-dkms-firmware$", packages, re.MULTILINE):
        yield finding(
            "rocm.firmware.dkms",
            Severity.WARNING,
            "amdgpu-dkms-firmware replaces the firmware of linux-firmware, often by an older one",
            "apt remove amdgpu-dkms-firmware, then rebuild the initramfs",
        )


def _override(context: DoctorContext) -> Iterator[Finding]:
    value = context.environment.get("HSA_OVERRIDE_GFX_VERSION")
    if value is None:
        # of a copied tree nobody may have kept the variables
        if context.live or context.environment:
            yield found("rocm.override", "HSA_OVERRIDE_GFX_VERSION is not set")
    elif value == "11.5.1":
        yield finding(
            "rocm.override",
            Severity.WARNING,
            "HSA_OVERRIDE_GFX_VERSION=11.5.1 says what the GPU is anyway",
            "unset it",
        )
    else:
        yield finding(
            "rocm.override",
            Severity.ERROR,
            f"HSA_OVERRIDE_GFX_VERSION={value} runs code for another chip: faults and wrong "
            "results",
            "unset it; gfx1151 is supported natively",
        )


def _cmdline(platform: Platform, gpu: Gpu) -> Iterator[Finding]:
    line = platform.cmdline
    pages, megabytes = asked_limits(platform)
    if pages and megabytes and abs(pages * PAGE - (megabytes << 20)) > GIB:
        yield finding(
            "rocm.cmdline.gtt",
            Severity.ERROR,
            f"ttm.pages_limit={pages} is {pages * PAGE / GIB:.1f} GiB, "
            f"amdgpu.gttsize={megabytes} is "
            f"{megabytes / 1024:.1f} GiB: one of them has a wrong digit",
            f"keep {pages_limit_advice(platform, gpu)} alone",
            line,
        )
    elif megabytes:
        yield finding(
            "rocm.cmdline.gtt",
            Severity.INFO,
            "amdgpu.gttsize is deprecated",
            f"use {platform.memory_module}.pages_limit (GiB x 262144)",
            line,
        )
    if re.search(r"\bamd_iommu=pt\b", line):
        yield finding(
            "rocm.cmdline.iommu",
            Severity.WARNING,
            "amd_iommu=pt is no value of that option; the kernel ignores it",
            "write iommu=pt, or amd_iommu=off",
            line,
        )
    elif "amd_iommu=off" not in line:
        yield finding(
            "rocm.cmdline.iommu",
            Severity.INFO,
            "the IOMMU is on: prefill is 5 to 16 % slower",
            "amd_iommu=off gains that and takes the NPU away",
        )
    if platform.memory_module == "amdttm" and re.search(r"(?<!\w)ttm\.pages_limit", line):
        yield finding(
            "rocm.cmdline.module",
            Severity.WARNING,
            "this kernel's module is amdttm: ttm.pages_limit has no effect",
            "use amdttm.pages_limit",
            line,
        )

    if harmful := [word for word in line.split() if word.startswith(HARMFUL)]:
        yield finding(
            "rocm.cmdline.harmful",
            Severity.INFO,
            f"{', '.join(harmful)} helps nothing here and was seen to harm",
            "leave it out",
            line,
        )
