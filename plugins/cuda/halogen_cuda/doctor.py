"""`halogen doctor` on a machine with an NVIDIA GPU; silent where there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import importlib_metadata

from halogen_core.spi import DoctorContext, Finding, Severity
from halogen_cuda.probe import nvidia_node

CUDA_INDEX = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
OLDEST_DRIVER = 580
"""For CUDA 13; earlier ones run builds for CUDA 12."""


def findings(context: DoctorContext) -> Iterator[Finding]:
    """Driver and torch build, where there is an NVIDIA GPU."""
    if not nvidia_node(context.root):
        if _on_the_bus(Path(context.root)):
            yield Finding(
                code="cuda.driver",
                severity=Severity.ERROR,
                text="an NVIDIA GPU is on the PCI bus, and its driver is not loaded",
                fix="install the driver (nvidia-smi must list the GPU); in a container: --gpus all",
            )
        return
    yield from _driver(Path(context.root))
    yield from _torch_build(context)


def _on_the_bus(root: Path) -> bool:
    """A display or compute device of vendor 10de."""
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        kind = vendor.with_name("class")
        if _text(vendor) == "0x10de" and _text(kind).startswith(("0x0300", "0x0302")):
            return True
    return False


def _driver(root: Path) -> Iterator[Finding]:
    told = re.search(r"(\d{3})\.(\d+)(?:\.\d+)?", _text(root / "proc/driver/nvidia/version"))
    if told is None:
        return
    old = int(told.group(1)) < OLDEST_DRIVER
    yield Finding(
        code="cuda.driver",
        severity=Severity.WARNING if old else Severity.OK,
        text=f"NVIDIA driver {told.group(0)}" + (" is too old for CUDA 13" if old else ""),
        fix=f"install driver {OLDEST_DRIVER} or newer, or a torch build for CUDA 12" if old else "",
    )


def _torch_build(context: DoctorContext) -> Iterator[Finding]:
    version = context.commands.get("pip show torch", "")
    if not version and context.live:
        try:
            version = importlib_metadata.version("torch")
        except importlib_metadata.PackageNotFoundError:
            return  # the core says so
    build = version.partition("+")[2]
    if build == "cpu" or build.startswith("rocm"):
        yield Finding(
            code="cuda.torch",
            severity=Severity.ERROR,
            text=f"an NVIDIA GPU is here, and torch {version} cannot use it",
            fix=CUDA_INDEX,
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
