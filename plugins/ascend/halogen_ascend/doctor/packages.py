"""Packages that are not what they seem, and why torch_npu cannot start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import importlib_metadata

from halogen_ascend.captured import Captured
from halogen_ascend.probe import Run, ask_torch_npu, count_devices
from halogen_core.spi import ENTRY_POINT_GROUP, Finding, Severity

OURS = "halogen-ascend"
PLACEHOLDERS: Mapping[str, str] = {
    "ascend-cann-toolkit": "a placeholder without software; CANN comes from the vendor's site",
    "ascend-cann-nnrt": "a placeholder whose setup pipes `Y` into an empty installer",
    "cann": "a package that only warns of a wrong installation",
    "flashx": "not this project: a CPU-only package of the same name as a blog's engine",
}


def findings(source: Captured) -> Iterator[Finding]:
    """All of this file; what is installed here only counts on the live machine."""
    if not source.context.live:
        return
    yield from impostors({d.name: d.version for d in importlib_metadata.distributions()})
    yield from owner(_owners())
    yield from runtime(source, installed=find_spec("torch_npu") is not None, run=ask_torch_npu)


def runtime(source: Captured, *, installed: bool, run: Run) -> Iterator[Finding]:
    """Whether torch_npu works; who has no NPU is not told to install it."""
    if not installed and not has_npu(source):
        calm = "no Ascend NPU here; --device ascend:sim:910B2 simulates one"
        yield Finding(code="HRT-7110", severity=Severity.OK, text=calm)
        return
    count, reasons = count_devices(run)
    for reason in reasons:
        yield Finding(code="HRT-7110", severity=Severity.INFO, text=reason.text, fix=reason.hint)
    if count:
        yield Finding(
            code="HRT-7110", severity=Severity.OK, text=f"torch_npu sees {count} device(s)"
        )


def has_npu(source: Captured) -> bool:
    """A device node, the vendor's software or its tool is here."""
    root = Path(source.context.root)
    traces = [*root.glob("dev/davinci[0-9]*"), *root.glob("usr/local/Ascend/*")]
    return bool(traces) or source.output("npu-smi info") is not None


def impostors(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Placeholders among the installed distributions."""
    for name, what in PLACEHOLDERS.items():
        if name in installed:
            yield Finding(
                code="HRT-7116",
                severity=Severity.WARNING,
                text=f"`{name}` {installed[name]} is {what}",
                fix=f"pip uninstall {name}",
            )


def owner(owners: list[str]) -> Iterator[Finding]:
    """Only our own distribution may provide the plugin `ascend`."""
    for name in owners:
        if name != OURS:
            yield Finding(
                code="HRT-7116",
                severity=Severity.ERROR,
                text=f"plugin `ascend` is also provided by `{name}`",
                fix=f"pip uninstall {name}; the real one is `{OURS}`",
            )


def _owners() -> list[str]:
    found = importlib_metadata.entry_points(group=ENTRY_POINT_GROUP, name="ascend")
    return [entry.dist.name for entry in found if entry.dist is not None]
