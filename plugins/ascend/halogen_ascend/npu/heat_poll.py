"""A thread that asks a real part's sensors every few seconds; no step ever waits for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import attrs

from halogen_ascend import npu_smi
from halogen_ascend.captured import Captured
from halogen_ascend.heat import Heat, Reading

log = logging.getLogger(__name__)

PERIOD_S = 5.0
"""The field notes' own interval; a heatsink needs longer to change."""
PATIENCE = 3
"""Silent answers in a row after which nobody asks any more."""
THERMAL_ZONE = "sys/class/thermal/thermal_zone0/temp"


def sense(source: Captured, index: int) -> Reading | None:
    """Temperature and clock by `npu-smi`, else the first thermal zone's temperature; only read."""
    if told := source.output(f"npu-smi info -t common -i {index}"):
        return npu_smi.reading(told)
    for _, text in source.files(THERMAL_ZONE):
        if text.strip().isdecimal():
            return Reading(celsius=int(text) / 1000)
    return None


@attrs.define(eq=False)
class HeatPoll:
    """Keeps `heat` up to date until stopped, or until the sensors stay silent."""

    heat: Heat
    read: Callable[[], Reading | None]
    period_s: float = PERIOD_S
    _silent: int = 0
    _stopped: threading.Event = attrs.field(factory=threading.Event)

    def start(self) -> None:
        """Ask from now on, in a daemon thread."""
        threading.Thread(target=self._run, name="ascend-heat", daemon=True).start()

    def stop(self) -> None:
        """Ask no more; a question under way may still be answered."""
        self._stopped.set()

    def once(self) -> bool:
        """Ask once; False when there is no point in going on."""
        reading = self.read()
        if reading is not None:
            self._silent = 0
            self.heat.take(reading)
            return True
        self._silent += 1
        if self._silent < PATIENCE:
            return True
        # what nobody watches must not stay throttled for ever
        self.heat.take(Reading())
        log.warning(
            "temperature and clock of `%s` cannot be read: heat is not watched", self.heat.name
        )
        return False

    def _run(self) -> None:
        while self.once() and not self._stopped.wait(self.period_s):
            pass
