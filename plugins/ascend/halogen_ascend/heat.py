"""What heat leaves of a part while it runs: told by its sensors, held with hysteresis.

A hot part lowers its own clock. Nothing here changes that or its protection: sensors are read, and
the scheduler is told that steps must be smaller and will take longer.
"""

from __future__ import annotations

import logging

import attrs

log = logging.getLogger(__name__)

HOT_C, COOL_C = 85.0, 80.0
"""Degrees above which a part is hot, and down to which it must cool before that is over."""
SLOW, FULL = 0.90, 0.95
"""The same of its share of the nominal clock: below, and up to which it must recover."""


@attrs.frozen(kw_only=True)
class Reading:
    """What sensors tell just now; None: they do not."""

    celsius: float | None = None
    clock_share: float | None = None
    """Of the nominal clock."""
    busy: bool = True
    """An idle part lowers its clock by itself, which is no throttling."""


@attrs.define(kw_only=True)
class Heat:
    """The state of one part, from readings taken in any thread."""

    name: str
    throttled: bool = False
    """Hot or slow, and not yet recovered from it."""
    clock_share: float = 1.0
    """Share of the nominal clock that steps run at; 1 unless throttled."""
    events: int = 0
    """Times that it began."""
    last: Reading = Reading()

    def take(self, reading: Reading) -> None:
        """Judge a reading; the beginning and the end are each logged once."""
        share = reading.clock_share if reading.clock_share is not None and reading.busy else 1.0
        hottest, slowest = (COOL_C, FULL) if self.throttled else (HOT_C, SLOW)
        hot = reading.celsius is not None and reading.celsius > hottest
        was, self.throttled = self.throttled, hot or share < slowest
        self.last, self.clock_share = reading, min(share, 1.0) if self.throttled else 1.0
        if self.throttled and not was:
            self.events += 1
            log.warning(
                "`%s` runs at %s: steps are kept small until it has recovered; "
                "see its cooling, its protection stays on",
                self.name,
                _words(reading),
            )
        elif was and not self.throttled:
            log.info("`%s` has recovered: %s", self.name, _words(reading))

    def gauges(self) -> dict[str, float]:
        """By metric name; sensors that do not answer are left out."""
        told = {"device_celsius": self.last.celsius, "device_clock_ratio": self.last.clock_share}
        return {
            "device_throttled": float(self.throttled),
            **{name: value for name, value in told.items() if value is not None},
        }


def _words(reading: Reading) -> str:
    clock = "" if reading.clock_share is None else f"{reading.clock_share:.0%} of its clock"
    heat = "" if reading.celsius is None else f"{reading.celsius:.0f} C"
    return " and ".join(filter(None, (clock, heat))) or "no reading"
