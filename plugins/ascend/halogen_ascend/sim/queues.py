"""A second queue beside the compute queue: copies that overlap, and the events that order them."""

from __future__ import annotations

import hashlib

import attrs
import numpy as np

from halogen_ascend.errors import MissingSynchronize, PlacementError
from halogen_ascend.sim.buffer import DeviceBuffer
from halogen_ascend.sim.device import SimDevice

HOST_ALIGN = 65536
"""Bytes that a mapped host buffer must be aligned to."""


@attrs.frozen
class Event:
    """Everything a queue was given up to `ticket`."""

    queue: str
    ticket: int


@attrs.define(eq=False)
class CopyQueue:
    """Asynchronous uploads: the source is read late, so it must stay as it was until the event."""

    device: SimDevice
    name: str = "copy"
    _open: list[tuple[int, DeviceBuffer, np.ndarray, bytes]] = attrs.field(factory=list)

    def upload(self, buffer: DeviceBuffer, host: np.ndarray) -> Event:
        """Start a copy; neither `buffer` nor `host` may be touched before `wait`.

        Raises `PlacementError` for host memory that is not aligned.
        """
        check_host_alignment(host)
        ticket = self.device.submitted.get(self.name, 0) + 1
        self.device.submitted[self.name] = ticket
        buffer.allocation.ticket = (self.name, ticket)
        buffer.allocation.written = None
        self._open.append((ticket, buffer, host, _digest(host)))
        return Event(self.name, ticket)

    def wait(self, event: Event) -> None:
        """Let the copies up to `event` finish; raises if a source was changed meanwhile."""
        due = [entry for entry in self._open if entry[0] <= event.ticket]
        self._open = [entry for entry in self._open if entry[0] > event.ticket]
        for ticket, buffer, host, digest in due:
            if _digest(host) != digest:
                raise MissingSynchronize(
                    f"the host source of copy {ticket} was changed before its event",
                    fix="keep the source until `wait`, or use a ring of sources",
                )
            self.device.fill(buffer, host)
        done = max(event.ticket, self.device.finished.get(self.name, 0))
        self.device.finished[self.name] = done


@attrs.define
class SlotRing:
    """Fixed slots handed out in turn; a slot comes round again only after its event."""

    size: int
    _events: dict[int, Event] = attrs.field(factory=dict)
    _next: int = 0

    def take(self, queue: CopyQueue) -> int:
        """The next slot, waiting for its last copy: reuse after the wrap is where rings break."""
        slot = self._next % self.size
        if event := self._events.pop(slot, None):
            queue.wait(event)
        self._next += 1
        return slot

    def put(self, slot: int, event: Event) -> None:
        """Remember what keeps a slot busy."""
        self._events[slot] = event


def host_aligned(nbytes: int) -> np.ndarray:
    """Host memory that can be mapped: uint8, at a multiple of 64 KiB."""
    raw = np.empty(nbytes + HOST_ALIGN, dtype=np.uint8)
    start = -raw.ctypes.data % HOST_ALIGN
    return raw[start : start + nbytes]


def host_like(array: np.ndarray) -> np.ndarray:
    """Such memory of the array's shape and dtype."""
    return host_aligned(array.nbytes).view(array.dtype).reshape(array.shape)


def check_host_alignment(host: np.ndarray) -> None:
    """Raises `PlacementError` for memory that a transport cannot map."""
    if host.nbytes and host.ctypes.data % HOST_ALIGN:
        raise PlacementError(
            f"host buffer at {host.ctypes.data:#x} is not aligned to {HOST_ALIGN} bytes",
            fix="take it from `host_aligned`, or let it be copied",
        )


def _digest(host: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(host).tobytes(), digest_size=16).digest()
