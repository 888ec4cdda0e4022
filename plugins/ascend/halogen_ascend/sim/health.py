"""What goes wrong on a queue: asynchronously, stickily, and with the op that caused it."""

from __future__ import annotations

import attrs

from halogen_ascend.sim.faults import Fault
from halogen_core.spi import DeviceError, DeviceLost, Transient

REOPEN = "the engine must open the device anew"


@attrs.define(eq=False)
class Health:
    """A device that is well, broken and not yet told, or lost."""

    blocking: bool = False
    """Raise asynchronous errors at the call that caused them, for debugging."""
    _pending: DeviceError | None = None
    _lost: str = ""

    @property
    def broken(self) -> bool:
        """An error waits to be told; what is submitted meanwhile is dropped."""
        return self._pending is not None

    def fail(self, fault: Fault, what: str) -> None:
        """`what` failed; raises at once what a caller may simply try again."""
        if fault.kind == "transient":
            raise Transient(f"{what} failed: the device was busy", retry_after_s=0.01)
        self._lost = f"{what} failed: device lost"
        self._pending = DeviceLost(self._lost, fix=REOPEN)
        if self.blocking:
            self.tell()

    def tell(self) -> None:
        """Raise what is pending, once; from then on the device is lost."""
        if self._pending is not None:
            error, self._pending = self._pending, None
            raise error

    def check(self) -> None:
        """Raises `DeviceLost` after the error was told."""
        if self._lost and self._pending is None:
            raise DeviceLost(self._lost, fix=REOPEN)
