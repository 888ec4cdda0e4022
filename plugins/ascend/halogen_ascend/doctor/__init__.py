"""`halogen doctor` on a machine with, or meant to have, an Ascend NPU."""

from __future__ import annotations

from collections.abc import Iterator

from halogen_ascend.captured import Captured
from halogen_ascend.doctor import machine, packages, sensors
from halogen_core.spi import DoctorContext, Finding


def checks(context: DoctorContext) -> Iterator[Finding]:
    """Everything that can be said from files and commands; nothing is changed, ever."""
    source = Captured(context)
    yield from packages.findings(source)
    yield from machine.findings(source)
    yield from sensors.findings(source)
