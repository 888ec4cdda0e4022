"""Faults on purpose: what to break, and when, written `kind[@launch][=value]`, comma-separated."""

from __future__ import annotations

import re

import attrs

from halogen_core.spi import ConfigError

KINDS = ("oom", "device_lost", "transient", "slow_core", "throttle")
_SYNTAX = re.compile(r"(?P<kind>\w+)(@(?P<at>\d+))?(=(?P<value>[\d.]+(:[\d.]+)?))?")


@attrs.frozen(kw_only=True)
class Fault:
    """`at` counts launches (allocations for `oom`) from 0; `value` is a factor, `core:factor` for
    a slow core, the clock's share for a throttle.
    """

    kind: str
    at: int = 0
    value: str = ""


def parse_faults(text: str) -> tuple[Fault, ...]:
    """`device_lost@12,slow_core=3:2.5` as faults; raises `ConfigError` (HRT-7105)."""
    return tuple(_parse(part.strip()) for part in text.split(",") if part.strip())


def _parse(part: str) -> Fault:
    match = _SYNTAX.fullmatch(part)
    if not match or match["kind"] not in KINDS:
        raise ConfigError(
            f"fault `{part}` is not `kind[@launch][=value]` with kind one of {', '.join(KINDS)}",
            code="HRT-7105",
            fix="for example --backend-option faults=device_lost@12",
        )
    return Fault(kind=match["kind"], at=int(match["at"] or 0), value=match["value"] or "")


@attrs.define
class FaultPlan:
    """The faults of one device and what has happened so far."""

    faults: tuple[Fault, ...] = ()
    launches: int = 0
    allocations: int = 0

    def next_launch(self) -> Fault | None:
        """The fault that this launch meets, if any."""
        self.launches += 1
        for fault in self.faults:
            if fault.kind in ("device_lost", "transient") and fault.at == self.launches - 1:
                return fault
        return None

    def next_allocation(self) -> bool:
        """Whether this allocation is to fail."""
        self.allocations += 1
        return any(f.kind == "oom" and f.at == self.allocations - 1 for f in self.faults)

    def slowdown(self, core: int) -> float:
        """Factor on the time of tasks on `core`."""
        for fault in self.faults:
            which, _, factor = fault.value.partition(":")
            if fault.kind == "slow_core" and self.launches > fault.at and which == str(core):
                return float(factor or 2.0)
        return 1.0

    def clock_share(self) -> float:
        """Share of the nominal clock left by thermal throttling."""
        for fault in self.faults:
            if fault.kind == "throttle" and self.launches > fault.at:
                return float(fault.value or 0.5)
        return 1.0
