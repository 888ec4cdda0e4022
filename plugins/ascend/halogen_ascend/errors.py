"""Faults that only an explicit, opaque device can have; all are `DeviceError`s with own codes."""

from __future__ import annotations

from halogen_core.spi import DeviceError


class PlacementError(DeviceError, TypeError):
    """An argument lies on the wrong side of the bus: host where device is wanted, or reverse."""

    default_code = "HRT-3501"


class UseAfterFree(DeviceError):
    """A buffer was used, or freed again, after its memory went back to the pool."""

    default_code = "HRT-3502"


class MissingSynchronize(DeviceError):
    """Data was read or replaced before the queue that works on it was known to be done."""

    default_code = "HRT-3503"


class PoisonRead(DeviceError):
    """Device memory was read that nothing ever wrote."""

    default_code = "HRT-3504"


class CaptureError(DeviceError):
    """Something a captured step cannot do: a host read inside, or a replay without arguments."""

    default_code = "HRT-3505"


class OutOfRange(DeviceError):
    """A block, slot or length lies outside what the device would address."""

    default_code = "HRT-3506"


class LayoutError(DeviceError):
    """A private layout (FRACTAL_NZ) was viewed, sliced or read as a plain matrix."""

    default_code = "HRT-3507"


class CollectiveError(DeviceError):
    """Ranks disagree on the order of collectives, or one waits for a rank that is idle."""

    default_code = "HRT-3508"
