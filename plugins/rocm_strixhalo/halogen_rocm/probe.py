"""Looking for a Strix Halo; every refusal names what is missing and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halogen_core.spi import DeviceInfo, ProbeResult, Reason
from halogen_rocm.platform import Gpu, Platform, read_platform


def probe() -> ProbeResult:
    """Runs in a process of its own: torch and the driver are loaded here."""
    platform = read_platform("/")
    if reason := hardware_reason(platform):
        return ProbeResult(score=0, reasons=(reason,))
    try:
        import torch
    except ImportError as exc:
        text = f"torch cannot be imported: {exc}"
        return ProbeResult(score=0, reasons=(Reason(code="no_torch", text=text),))
    build = (torch.version.hip, torch.version.cuda)
    reason = torch_reason(build, _archs(torch), available=torch.cuda.is_available())
    reason = reason or hip_reason(hip_names(torch))
    gpu = platform.strix_halo
    if reason or gpu is None:
        return ProbeResult(score=0, reasons=(reason,) if reason else ())
    return ProbeResult(
        score=80,
        devices=(
            DeviceInfo(
                id="rocm_strixhalo:0",
                name="AMD Strix Halo (Radeon 8050S/8060S)",
                arch=gpu.arch,
                driver=f"HIP {torch.version.hip}, kernel {platform.kernel}",
                memory_bytes=max(gpu.gtt_total, gpu.vram_total),
            ),
        ),
    )


def _archs(torch: Any) -> list[str]:
    try:
        archs: list[str] = torch.cuda.get_arch_list()
    except Exception:  # a broken runtime raises anything
        return []
    return archs


def hip_names(torch: Any) -> list[str]:
    """What HIP calls each of its devices, like `gfx1151`, in torch's order."""
    count = torch.cuda.device_count()
    found = [torch.cuda.get_device_properties(i) for i in range(count)]
    return [str(getattr(properties, "gcnArchName", "")).partition(":")[0] for properties in found]


def hip_reason(names: Sequence[str]) -> Reason | None:
    """Why HIP cannot run on the Strix Halo though it sees GPUs."""
    if "gfx1151" in names:  # a discrete GPU beside it may come first
        return None
    return Reason(
        code="hip_arch",
        text=f"HIP sees {', '.join(names) or 'no GPU'}, not gfx1151",
        hint="HIP_VISIBLE_DEVICES must not hide the integrated GPU, and HSA_OVERRIDE_GFX_VERSION "
        "must be unset: it makes a gfx1151 look like another chip",
    )


def hardware_reason(platform: Platform) -> Reason | None:
    """Why this machine cannot run the backend, whatever is installed."""
    gpu = platform.strix_halo
    if gpu is None and (hidden := hidden_gpu(platform)):
        return hidden
    if gpu is None:
        others = ", ".join(f"{_named(g)}" for g in platform.gpus) or "no AMD GPU"
        return Reason(
            code="no_gfx1151",
            text=f"this backend is for Strix Halo (gfx1151, PCI 1002:1586); here is {others}",
            hint=f"{_fewer_registers(platform)}choose another backend, e.g. --backend cpu_ggml",
        )
    if not platform.has_kfd or not platform.render_nodes:
        missing = [
            name
            for name, there in (
                ("/dev/kfd", platform.has_kfd),
                ("/dev/dri/renderD*", bool(platform.render_nodes)),
            )
            if not there
        ]
        return Reason(
            code="no_nodes",
            text=f"a Strix Halo exists, but {' and '.join(missing)} does not",
            hint="load amdgpu; in a container pass --device /dev/kfd --device /dev/dri and the "
            "groups "
            "render and video",
        )
    return None


def hidden_gpu(platform: Platform) -> Reason | None:
    """Why a Strix Halo's GPU is not to be seen where there must be one; None: there is none."""
    if platform.strix_halo is not None:
        return None
    if platform.on_bus:
        booted = "the kernel was booted with nomodeset: leave that out; " if (
            "nomodeset" in platform.cmdline.split()
        ) else ""  # fmt: skip
        return Reason(
            code="no_driver",
            text="a Strix Halo's GPU (PCI 1002:1586) is here, and no driver has it",
            hint=f"{booted}load amdgpu (`modprobe amdgpu`; it must not be blacklisted) with "
            "kernel 6.18.4 or newer",
        )
    if platform.has_strix_halo_cpu:
        return Reason(
            code="gpu_hidden",
            text=f"the CPU is {platform.cpu}, and its GPU is not to be seen",
            hint="enable the integrated GPU in the BIOS; a virtual machine must have it passed "
            "through",
        )
    return None


def _fewer_registers(platform: Platform) -> str:
    if not any(gpu.arch.startswith("gfx115") for gpu in platform.gpus):
        return ""
    return "other gfx115x have fewer registers, so kernels tuned for gfx1151 are not for them; "


def _named(gpu: Gpu) -> str:
    return f"{gpu.arch} (PCI 1002:{gpu.device_id:04x})"


def torch_reason(
    build: tuple[str | None, str | None], archs: list[str], *, available: bool
) -> Reason | None:
    """Why the installed torch cannot use the GPU, instead of `No CUDA GPUs are available`."""
    hip, cuda = build
    if hip is None:
        kind = f"a CUDA {cuda} build" if cuda else "a CPU build"
        return Reason(
            code="wrong_torch",
            text=f"the installed torch is {kind}; a Strix Halo needs a ROCm build",
            hint="pip install torch --index-url https://rocm.nightlies.amd.com/v2/gfx1151/ "
            "(the default index gives CUDA builds)",
        )
    if archs and not any(arch.startswith("gfx1151") for arch in archs):
        return Reason(
            code="torch_arch",
            text=f"torch for HIP {hip} has code for {', '.join(archs)}, not for gfx1151",
            hint="install a build with gfx1151; HSA_OVERRIDE_GFX_VERSION is no way out: code for "
            "another chip gives wrong results or faults",
        )
    if not available:
        return Reason(
            code="hip_unavailable",
            text=f"torch for HIP {hip} sees no GPU (it would say `No CUDA GPUs are available`)",
            hint="this user must be in the groups render and video, HSA_OVERRIDE_GFX_VERSION "
            "unset, "
            "HIP_VISIBLE_DEVICES not empty; see `halogen doctor`",
        )
    return None
