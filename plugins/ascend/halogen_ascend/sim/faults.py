"""Faults on purpose: what to break, and when: `kind[@launch[-launch]][=value]`, comma-separated."""

from __future__ import annotations

import re

import attrs

from halogen_core.spi import ConfigError

KINDS = ("oom", "device_lost", "transient", "slow_core", "throttle")
LASTING = ("slow_core", "throttle")
"""These hold from a launch on, or between two; the others happen once."""
_NUMBER = r"\d+(\.\d+)?"
_SYNTAX = re.compile(
    rf"(?P<kind>\w+)(@(?P<at>\d+)(-(?P<until>\d+))?)?(=((?P<core>\d+):)?(?P<factor>{_NUMBER}))?"
)
NOMINAL_C, THROTTLED_C = 47.0, 91.0
"""What the simulated thermometer shows, as the captured text of a real one does."""


@attrs.frozen(kw_only=True)
class Fault:
    """`at` and `until` count launches (allocations for `oom`) from 0."""

    kind: str
    at: int = 0
    until: int | None = None
    """Where a lasting fault ends; None: never."""
    core: int = 0
    factor: float = 1.0
    """On the time of a slow core's tasks, or the clock's share that a throttle leaves."""

    def holds(self, launch: int) -> bool:
        """Whether a lasting fault is there at this launch."""
        return self.at <= launch and (self.until is None or launch < self.until)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """`device_lost@12,slow_core=3:2.5` as faults; raises `ConfigError` (HRT-7105)."""
    return tuple(_parse(part.strip()) for part in text.split(",") if part.strip())


def _parse(part: str) -> Fault:
    match = _SYNTAX.fullmatch(part)
    if not match or match["kind"] not in KINDS:
        raise _wrong(part, f"`kind[@launch[-launch]][=value]` with kind one of {', '.join(KINDS)}")
    kind, until = match["kind"], match["until"]
    made = Fault(
        kind=kind,
        at=int(match["at"] or 0),
        until=None if until is None else int(until),
        core=int(match["core"] or 0),
        factor=float(match["factor"] or (0.5 if kind == "throttle" else 1.0)),
    )
    if kind not in LASTING and (until is not None or match["factor"]):
        raise _wrong(part, f"`{kind}@launch`: it happens once and has no value")
    if (match["core"] is not None) != (kind == "slow_core"):
        raise _wrong(part, "`slow_core=core:factor`; only it names a core")
    if made.until is not None and made.until <= made.at:
        raise _wrong(part, "from a launch to a later one")
    if kind == "throttle" and not 0 < made.factor <= 1:
        raise _wrong(part, "a throttle to a share of the clock above 0 and up to 1")
    if kind == "slow_core" and made.factor < 1:
        raise _wrong(part, "a slow core with a factor of 1 or more")
    return made


def _wrong(part: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"fault `{part}` is not {allowed}",
        code="HRT-7105",
        fix="for example --backend-option faults=device_lost@12 or faults=throttle@100-900=0.5",
    )


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
        held = (f.factor for f in self._held("slow_core") if f.core == core)
        return max(held, default=1.0)

    def clock_share(self) -> float:
        """Share of the nominal clock left by thermal throttling."""
        return min((f.factor for f in self._held("throttle")), default=1.0)

    def celsius(self) -> float:
        """What the part's thermometer shows."""
        return THROTTLED_C if self._held("throttle") else NOMINAL_C

    def _held(self, kind: str) -> list[Fault]:
        """Lasting faults of a kind at the latest launch."""
        return [f for f in self.faults if f.kind == kind and f.holds(self.launches - 1)]
