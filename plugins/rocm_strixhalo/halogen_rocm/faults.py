"""What the ROCm stack's error texts mean, and what to do."""

from __future__ import annotations

import attrs


@attrs.frozen
class Fault:
    """One known text (matched without case) for people."""

    text: str
    meaning: str
    fix: str


FAULTS = (
    Fault(
        "No CUDA GPUs are available",
        "torch was not built for ROCm, this user may not open /dev/kfd, or "
        "HSA_OVERRIDE_GFX_VERSION names another chip",
        "install a ROCm torch with gfx1151, join the groups render and video, unset the override",
    ),
    Fault(
        "invalid device function",
        "the library holds no code for gfx1151",
        "install builds for gfx1151; an override to another gfx gives wrong results",
    ),
    Fault(
        "No compatible code objects",
        "the library holds no code for gfx1151",
        "install builds for gfx1151",
    ),
    Fault(
        "HSA_STATUS_ERROR_INVALID_ISA",
        "code for another gfx was loaded",
        "unset HSA_OVERRIDE_GFX_VERSION and install builds for gfx1151",
    ),
    Fault(
        "HSA_STATUS_ERROR_INVALID_CODE_OBJECT",
        "compiler and runtime are of different ROCm versions",
        "install torch, Triton and ROCm of one release",
    ),
    Fault(
        "HIP error: out of memory",
        "the GTT limit or the KFD limit is reached while the host still has free memory",
        "see `halogen doctor`: raise ttm.pages_limit, or plan less with --pool-size",
    ),
    Fault(
        "Page not present",
        "firmware, CWSR, a gfx override or the IOMMU broke an access",
        "kernel 6.18.4 or newer (or amdgpu.cwsr_enable=0), linux-firmware other than 20251125, no "
        "override",
    ),
    Fault(
        "MES failed to respond to msg=REMOVE_QUEUE",
        "the GPU's scheduler firmware hangs",
        "reboot; update linux-firmware (MES 0x83 is broken, 0x80 is good)",
    ),
    Fault(
        "Memory critical error",
        "memory that the GPU still uses was freed, or SELinux stands in the way",
        "load weights without memory maps (halogen does); check SELinux denials",
    ),
    Fault(
        "VK_ERROR_DEVICE_LOST",
        "one dispatch ran longer than the driver's lockup timeout of 2 s",
        "use smaller prompt chunks (--max-batch-tokens)",
    ),
    Fault(
        "SVM mapping failed",
        "managed memory was asked for beyond what the system holds",
        "plan less memory; halogen uses no managed memory",
    ),
)


def explain(message: str) -> Fault | None:
    """The known fault that a message speaks of."""
    low = message.lower()
    return next((fault for fault in FAULTS if fault.text.lower() in low), None)
