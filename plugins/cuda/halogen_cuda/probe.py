"""Looking for NVIDIA GPUs; every refusal names what is missing and what to do."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from halogen_core.spi import DeviceInfo, ProbeContext, ProbeResult, Reason

LEAST_CAPABILITY = (8, 0)


def probe(context: ProbeContext) -> ProbeResult:
    """Runs in a process of its own: torch and the driver are loaded here."""
    try:
        import torch
    except ImportError as exc:
        return refused("no_torch", f"torch cannot be imported: {exc}", "pip install torch")
    if reason := wrong_build(torch.version.cuda, torch.version.hip, nvidia_node("/")):
        return ProbeResult(score=0, reasons=(reason,))
    if not torch.cuda.is_available():
        return ProbeResult(score=0, reasons=(driver_reason("/", torch.version.cuda),))
    try:
        import_module("triton")
    except ImportError as exc:
        return refused("no_triton", f"triton cannot be imported: {exc}", "pip install triton")
    return devices(torch, context)


def devices(torch: Any, context: ProbeContext) -> ProbeResult:
    """The GPUs that are new enough, or why none is."""
    found, old = [], []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        if capability < LEAST_CAPABILITY:
            old.append(f"{properties.name} has compute capability {capability[0]}.{capability[1]}")
            continue
        found.append(
            DeviceInfo(
                id=f"cuda:{index}",
                name=properties.name,
                arch=f"sm_{capability[0]}{capability[1]}",
                driver=f"CUDA {torch.version.cuda}",
                memory_bytes=properties.total_memory,
            )
        )
    if not found:
        text = f"{'; '.join(old) or 'no GPU'}; the kernels need 8.0 (Ampere) or newer"
        return refused("old_gpu", text, "use another backend, e.g. --backend cpu_ggml")
    return ProbeResult(score=80, devices=tuple(found))


def wrong_build(cuda: str | None, hip: str | None, has_gpu: bool) -> Reason | None:
    """A torch that cannot drive NVIDIA GPUs at all."""
    if cuda is not None:
        return None
    if hip is not None:
        return Reason(
            code="rocm_torch",
            text=f"the installed torch is a ROCm build (HIP {hip}); it drives AMD GPUs only",
            hint="choose --backend rocm_strixhalo, or install a CUDA build of torch",
        )
    seen = "an NVIDIA device node exists" if has_gpu else "no NVIDIA device node either"
    return Reason(
        code="cpu_torch",
        text=f"the installed torch is a CPU build; {seen}",
        hint="pip install torch --index-url https://download.pytorch.org/whl/cu130",
    )


def driver_reason(root: str, cuda: str | None) -> Reason:
    """Why a CUDA torch sees no GPU (torch itself says only `No CUDA GPUs are available`)."""
    if not nvidia_node(root):
        return Reason(
            code="no_device",
            text=f"torch was built for CUDA {cuda}, but /dev/nvidia0 does not exist",
            hint="no NVIDIA GPU or no driver here; in a container, start it with --gpus all",
        )
    version = Path(root, "proc/driver/nvidia/version")
    driver = version.read_text().splitlines()[0] if version.is_file() else "unknown driver"
    return Reason(
        code="driver",
        text=f"a GPU exists, but torch for CUDA {cuda} cannot use it ({driver})",
        hint="update the driver to one that supports this CUDA version; see `nvidia-smi`, and "
        "check CUDA_VISIBLE_DEVICES",
    )


def nvidia_node(root: str) -> bool:
    """Whether the kernel driver made a device node."""
    return Path(root, "dev/nvidia0").exists() or Path(root, "dev/nvidiactl").exists()


def refused(code: str, text: str, hint: str) -> ProbeResult:
    """Score 0 with one reason."""
    return ProbeResult(score=0, reasons=(Reason(code=code, text=text, hint=hint),))
