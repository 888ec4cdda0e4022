"""Packages that are not what they seem, and why torch_npu cannot start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import importlib_metadata

from halogen_ascend.captured import Captured
from halogen_ascend.probe import ask_torch_npu, count_devices
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
    count, reasons = count_devices(ask_torch_npu)
    for reason in reasons:
        yield Finding(code="HRT-7110", severity=Severity.INFO, text=reason.text, fix=reason.hint)
    if count:
        yield Finding(
            code="HRT-7110", severity=Severity.OK, text=f"torch_npu sees {count} device(s)"
        )


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
