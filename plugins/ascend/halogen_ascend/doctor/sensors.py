"""Temperature and clock: watched and told, never changed. Protection is not ours to touch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halogen_ascend import npu_smi
from halogen_ascend.captured import Captured
from halogen_ascend.heat import HOT_C, SLOW
from halogen_core.spi import Finding, Severity


def findings(source: Captured) -> Iterator[Finding]:
    """All of this file."""
    table = source.output("npu-smi info")
    for chip in npu_smi.table(table or ""):
        yield from _temperature(f"chip {chip.index}", chip.temperature)
        told = source.output(f"npu-smi info -t common -i {chip.index}")
        if told and (pair := npu_smi.clocks(told)):
            yield clock_finding(chip.index, *pair)
    for path, text in source.files("sys/class/thermal/thermal_zone0/temp"):
        if text.strip().lstrip("-").isdecimal():
            yield from _temperature(path, int(text) // 1000)
    yield from _protection(source)


def clock_finding(index: int, current: int, nominal: int) -> Finding:
    """Throttled or not, by the ratio."""
    slow = current < SLOW * nominal
    return Finding(
        code="HRT-7115",
        severity=Severity.WARNING if slow else Severity.OK,
        text=f"chip {index} runs at {current} of {nominal} MHz ({current / nominal:.0%})",
        fix="it is idle, hot or power-capped: see temperature and power first" if slow else "",
    )


def _temperature(what: str, degrees: int) -> Iterator[Finding]:
    if degrees > HOT_C:
        yield Finding(
            code="HRT-7112",
            severity=Severity.WARNING,
            text=f"{what} is at {degrees} C; above {HOT_C:.0f} C it slows down",
            fix="improve cooling or lower the load; leave thermal protection on",
        )


def _protection(source: Captured) -> Iterator[Finding]:
    for path, text in source.files("etc/modprobe.d/*.conf"):
        for line in text.splitlines():
            if re.search(r"^\s*options\s+ascend\w*\s.*thermal_policy\s*=\s*0", line):
                yield Finding(
                    code="HRT-7113",
                    severity=Severity.ERROR,
                    text=f"{path} switches thermal protection off",
                    fix="remove the line and reload the module: cards have burnt this way",
                    evidence=line.strip(),
                )
