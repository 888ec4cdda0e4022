"""Doctor's rules on what is installed for the GPU: torch build, ROCm, groups, switches."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import importlib_metadata

from halogen_core.spi import DoctorContext, Finding, Severity
from halogen_rocm.findings import finding, found
from halogen_rocm.platform import text

ROCM_INDEX = "pip install torch --index-url https://rocm.nightlies.amd.com/v2/gfx1151/"
OLDEST_ROCM = (7, 0)
GROUPS = ("render", "video")
TIMEOUT_S = 10.0


def software_findings(context: DoctorContext) -> Iterator[Finding]:
    """Everything about installed software."""
    yield from _torch_build(context)
    yield from _rocminfo(context)
    yield from _rocm_version(context)
    yield from _groups(context)
    yield from _switches(context)


def _torch_build(context: DoctorContext) -> Iterator[Finding]:
    """The wheel's own name tells: torch says only `No CUDA GPUs are available`."""
    version = context.commands.get("pip show torch", "")
    if not version and context.live:
        try:
            version = importlib_metadata.version("torch")
        except importlib_metadata.PackageNotFoundError:
            return  # the core says so
    if not version:
        return
    build = version.partition("+")[2] or "the default index's CUDA build"
    if "rocm" in build:
        yield found("rocm.torch", f"torch {version} is a ROCm build")
    else:
        yield finding(
            "rocm.torch",
            Severity.ERROR,
            f"torch {version} is {build}, a CPU or CUDA wheel on a ROCm box: it sees no GPU "
            "(`No CUDA GPUs are available`)",
            ROCM_INDEX,
        )


def _rocminfo(context: DoctorContext) -> Iterator[Finding]:
    """Output of `rocminfo`, captured or live, where it is installed."""
    shown = context.commands.get("rocminfo")
    if shown is None and context.live:
        shown = _output("rocminfo")
    if shown is None:
        return
    names = re.findall(r"^\s*Name:\s+(gfx\w+)", shown, flags=re.MULTILINE)
    if "gfx1151" in names:
        yield found("rocm.rocminfo", "rocminfo lists gfx1151")
    else:
        yield finding(
            "rocm.rocminfo",
            Severity.ERROR,
            f"rocminfo lists {', '.join(names) or 'no GPU'}, not gfx1151",
            "join the groups render and video, unset HSA_OVERRIDE_GFX_VERSION, install ROCm 7",
        )


def _output(command: str) -> str | None:
    """All that a command without arguments says; None: it cannot be run."""
    path = shutil.which(command)
    try:
        done = subprocess.run(
            [path or f"/opt/rocm/bin/{command}"],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr


def _rocm_version(context: DoctorContext) -> Iterator[Finding]:
    for path in ("opt/rocm/.info/version", "opt/rocm/core/.info/version"):
        numbers = re.findall(r"\d+", text(Path(context.root, path)))[:2]
        if len(numbers) < 2:
            continue
        version = (int(numbers[0]), int(numbers[1]))
        if version < OLDEST_ROCM:
            yield finding(
                "rocm.version",
                Severity.WARNING,
                f"ROCm {version[0]}.{version[1]} has no libraries for gfx1151",
                "install ROCm 7, or a torch wheel that brings its own",
            )
        else:
            yield found("rocm.version", f"ROCm {version[0]}.{version[1]}")
        return


def _groups(context: DoctorContext) -> Iterator[Finding]:
    """Output of `id -Gn`, captured or live."""
    shown = context.commands.get("id -Gn")
    if shown is None and context.live:
        import grp

        names = {g.gr_gid: g.gr_name for g in grp.getgrall()}
        shown = " ".join(names.get(n, str(n)) for n in {*os.getgroups(), os.getegid()})
    if shown is None or "root" in shown.split():
        return
    if context.live and _may_open(context.root):
        yield found("rocm.groups", "this user may open /dev/kfd and a render node")
        return
    if missing := [name for name in GROUPS if name not in shown.split()]:
        yield finding(
            "rocm.groups",
            Severity.ERROR if "render" in missing else Severity.WARNING,
            f"this user is not in {' and '.join(missing)}",
            "sudo usermod -aG render,video $USER, then log in again",
            shown,
        )
    else:
        yield found("rocm.groups", "this user is in render and video")


def _may_open(root: str) -> bool:
    """Whether the nodes can be opened, by whatever rule: an ACL of the desktop does as well."""
    nodes = Path(root, "dev/dri").glob("renderD*")
    able = [os.access(node, os.R_OK | os.W_OK) for node in (Path(root, "dev/kfd"), *nodes)]
    return able[0] and any(able[1:])


def _switches(context: DoctorContext) -> Iterator[Finding]:
    """Variables that other libraries read."""
    env = context.environment
    if env.get("ROCBLAS_USE_HIPBLASLT", "1") == "0":
        yield finding(
            "rocm.switches.hipblaslt",
            Severity.WARNING,
            "ROCBLAS_USE_HIPBLASLT=0: large matrix products are several times slower",
            "unset it, or set it to 1",
        )
    if env.get("HIP_VISIBLE_DEVICES") == "" or env.get("ROCR_VISIBLE_DEVICES") == "":
        yield finding(
            "rocm.switches.hidden",
            Severity.ERROR,
            "HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES is empty: it hides the GPU",
            "unset it, or set it to 0",
        )
    if context.live and "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL" not in env:
        yield finding(
            "rocm.switches.sdpa",
            Severity.INFO,
            "without TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 torch's own attention is plain "
            "arithmetic; halogen's kernels do not use it",
            "set it for other programs on this machine",
        )
