"""What idling does to the clock, and the heartbeat that prevents it, in simulated time.

An idle part lowers its clock; the first request after a pause pays for that. With the boost, empty
launches keep it awake, at the price of their energy. Thresholds are the field notes', unverified.
"""

from __future__ import annotations

import attrs

IDLE_AFTER_S = 10.0
IDLE_SHARE = 0.5
RAMP_S = 0.2
HEARTBEAT_S = 5.0


@attrs.define(kw_only=True)
class IdleClock:
    """The share of its clock that a part has, by when it worked last."""

    boost: bool = False
    heartbeats: int = 0
    """Empty launches so far: one for each `HEARTBEAT_S` without work."""
    _last_work: float = 0.0
    _slow_until: float = 0.0

    def share(self, now: float) -> float:
        """For work that starts at `now`, after a pause since the last."""
        pause = now - self._last_work
        if self.boost:
            beats = int(pause / HEARTBEAT_S)
            self.heartbeats += beats
            self._last_work += beats * HEARTBEAT_S
        elif pause > IDLE_AFTER_S:
            self._slow_until = now + RAMP_S
        return IDLE_SHARE if now < self._slow_until else 1.0

    def worked(self, until: float) -> None:
        """Work went on until then."""
        self._last_work = until
