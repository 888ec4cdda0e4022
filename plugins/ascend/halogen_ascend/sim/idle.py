"""What idling does to the clock, and the heartbeat that prevents it, in simulated time.

An idle part lowers its clock; the first request after a pause pays for that. With the boost, empty
launches keep it awake, at the price of their energy. Thresholds are the field notes', unverified.
"""

from __future__ import annotations

import attrs

from halogen_ascend.sim.device import SimDevice
from halogen_ascend.sim.tasks import MicroTask, Program

IDLE_AFTER_S = 10.0
IDLE_SHARE = 0.5
RAMP_S = 0.2
HEARTBEAT_S = 5.0


@attrs.define(kw_only=True)
class IdleGovernor:
    """Moves a device's clock share as simulated time passes."""

    device: SimDevice = attrs.field(kw_only=False)
    boost: bool = False
    heartbeats: int = 0
    _last_work: float = 0.0
    _slow_until: float = 0.0

    def advance(self, until: float) -> None:
        """Let the device idle until `until`; heartbeats only when idle for long enough."""
        while self.boost and until - self._last_work > HEARTBEAT_S:
            self.device.now = max(self.device.now, self._last_work + HEARTBEAT_S)
            beat = Program("heartbeat", [MicroTask(unit="vector", label="heartbeat")])
            self.device.submit("heartbeat", lambda _, beat=beat: beat)  # type: ignore[misc]
            self.heartbeats += 1
            self._last_work = self.device.now
        self.device.now = max(self.device.now, until)
        if self.device.now - self._last_work > IDLE_AFTER_S:
            self._slow_until = self.device.now + RAMP_S
        self._set_clock()

    def worked(self) -> None:
        """Work was done just now."""
        self._last_work = self.device.now
        self._set_clock()

    def _set_clock(self) -> None:
        self.device.clock_share = IDLE_SHARE if self.device.now < self._slow_until else 1.0
