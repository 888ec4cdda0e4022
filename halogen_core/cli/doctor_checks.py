"""Checks of `halogen doctor` that hold for every backend; vendors add theirs by a hook.

Every path is below `context.root`, so that tests can give a tree of files for a machine.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import importlib_metadata

from halogen_core.plugins import PluginRegistry, PluginStatus
from halogen_core.plugins.missing import advice
from halogen_core.spi import DoctorContext, Finding, Severity

GIB = 1 << 30
LOW_MEMORY = 8 * GIB
OLDEST_PYTHON = (3, 11)


def core_findings(context: DoctorContext) -> Iterator[Finding]:
    """Python, torch, memory, swap, CPU governor."""
    if context.live:
        yield from _python()
        yield from _torch()
    yield from _memory(context)
    yield from _swap(context)
    yield from _governor(context)


def plugin_findings(registry: PluginRegistry, context: DoctorContext) -> Iterator[Finding]:
    """Plugins that cannot be used, and what the others find."""
    for _plugin, finding in registry.collect("halogen_doctor_checks", context=context):
        yield finding
    yield _backends(registry)
    for plugin in registry.plugins:
        if plugin.status in (PluginStatus.BROKEN, PluginStatus.INCOMPATIBLE):
            yield Finding(
                code="core.plugin",
                severity=Severity.ERROR,
                text=f"plugin `{plugin.name}` ({plugin.distribution}) is {plugin.status}",
                fix=f"reinstall or upgrade {plugin.distribution}, or block it with --no-plugin",
                evidence=plugin.reason,
            )


def _backends(registry: PluginRegistry) -> Finding:
    """What is installed; whether it can run takes a probe, which loads drivers."""
    names = sorted(spec.name for plugin in registry.plugins for spec in plugin.backends)
    if not names:
        return Finding(
            code="core.backends",
            severity=Severity.ERROR,
            text="no backend is installed",
            fix=advice("cpu_ggml"),
        )
    return Finding(
        code="core.backends",
        severity=Severity.INFO,
        text=f"installed backends: {', '.join(names)}",
        fix="`halogen plugins list` says which can run here and why others cannot;"
        " `halogen selftest` checks the numbers of the one that would run",
    )


def _python() -> Iterator[Finding]:
    good = sys.version_info >= OLDEST_PYTHON
    yield Finding(
        code="core.python",
        severity=Severity.OK if good else Severity.ERROR,
        text=f"Python {platform.python_version()} on {platform.machine()}",
        fix="" if good else "install Python 3.11 or newer",
        evidence=sys.executable,
    )


def _torch() -> Iterator[Finding]:
    """The installed build, by its version; torch is not imported."""
    try:
        version = importlib_metadata.version("torch")
    except importlib_metadata.PackageNotFoundError:
        yield Finding(
            code="core.torch",
            severity=Severity.ERROR,
            text="torch is not installed",
            fix="pip install torch, from the index of your hardware",
        )
        return
    build = version.partition("+")[2] or "the index's default build"
    yield Finding(code="core.torch", severity=Severity.OK, text=f"torch {version} ({build})")


def _memory(context: DoctorContext) -> Iterator[Finding]:
    facts = _meminfo(context)
    if "MemTotal" not in facts:
        yield Finding(
            code="core.memory", severity=Severity.WARNING, text="memory size is not readable"
        )
        return
    total, free = facts["MemTotal"], facts.get("MemAvailable", 0)
    limit, used = _cgroup(context)
    text = f"{free / GIB:.1f} GiB of {total / GIB:.1f} GiB are free"
    if limit is not None and limit < total:
        free = min(free, limit - used)
        text += f"; the control group allows {limit / GIB:.1f} GiB, {used / GIB:.1f} GiB used"
    low = free < LOW_MEMORY
    yield Finding(
        code="core.memory",
        severity=Severity.INFO if low else Severity.OK,
        text=text,
        fix="small models only: weights, workspace and KV pool must fit" if low else "",
        evidence=f"{free} bytes usable",
    )


def _swap(context: DoctorContext) -> Iterator[Finding]:
    lines = _lines(context, "proc/swaps")[1:]
    names = [line.split()[0] for line in lines if line.split()]
    yield Finding(
        code="core.swap",
        severity=Severity.WARNING if names else Severity.OK,
        text=f"swap is on: {', '.join(names)}" if names else "swap is off",
        fix="a paged-out KV pool stalls every step: `swapoff -a`, or MemorySwapMax=0 for the unit"
        if names
        else "",
    )


def _governor(context: DoctorContext) -> Iterator[Finding]:
    pattern = "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor"
    names = {p.read_text().strip() for p in Path(context.root).glob(pattern)}
    if names and names != {"performance"}:
        yield Finding(
            code="core.governor",
            severity=Severity.WARNING,
            text=f"CPU governor is {', '.join(sorted(names))}",
            fix="`cpupower frequency-set -g performance` lowers the latency of scheduling",
        )


def _meminfo(context: DoctorContext) -> dict[str, int]:
    """Bytes by name."""
    rows = (line.split() for line in _lines(context, "proc/meminfo"))
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


def _cgroup(context: DoctorContext) -> tuple[int | None, int]:
    """Limit and use in bytes of the tightest enclosing control group (version 2)."""
    root = Path(context.root) / "sys/fs/cgroup"
    own = next((x[3:] for x in _lines(context, "proc/self/cgroup") if x.startswith("0::")), "/")
    folder = root / own.lstrip("/")
    found: list[tuple[int, int]] = []
    for place in (folder, *folder.parents):
        limit, used = _number(place / "memory.max"), _number(place / "memory.current")
        if limit is not None:
            found.append((limit, used or 0))
        if place == root:
            break
    return min(found, default=(None, 0), key=lambda pair: pair[0] - pair[1])


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _lines(context: DoctorContext, path: str) -> list[str]:
    try:
        return (Path(context.root) / path).read_text().splitlines()
    except OSError:
        return []


def worst(findings: Iterable[Finding]) -> Severity:
    """The gravest severity among findings."""
    order = list(Severity)
    return max((f.severity for f in findings), key=order.index, default=Severity.OK)
