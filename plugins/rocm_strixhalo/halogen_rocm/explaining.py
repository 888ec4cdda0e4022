"""Errors of the ROCm stack told by what they mean, wherever the host meets them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from halogen_core.spi import OPS, DeviceError, HalogenError
from halogen_rocm.faults import explain

Full = Callable[[torch.OutOfMemoryError], HalogenError]
"""What to raise when the device's memory is full."""
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@contextlib.contextmanager
def explained(full: Full | None = None) -> Iterator[None]:
    """Raise `DeviceError` (HRT-7001) with cause and fix for a text that is known."""
    try:
        yield
    except torch.OutOfMemoryError as exc:
        if full is None:
            raise
        raise full(exc) from exc
    except RuntimeError as exc:
        fault = explain(str(exc))
        if fault is None:
            raise
        text = f"`{fault.text}`: {fault.meaning}"
        raise DeviceError(text, code="HRT-7001", fix=fault.fix) from exc


class ExplainedOps:
    """`own` ops, `explained`; everything else is as `own` has it at that moment."""

    def __init__(self, own: object, full: Full) -> None:
        self._own = own
        self._full = full

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._own, name)
        return explaining(found, self._full) if name in OPS else found


def explaining(call: Callable[..., Any], full: Full) -> Callable[..., Any]:
    """`call`, `explained`."""

    def told(*args: Any, **named: Any) -> Any:
        with explained(full):
            return call(*args, **named)

    return told


def asked_bytes(message: str) -> int:
    """What torch's text on full memory says was tried to allocate; 0: it does not say."""
    found = re.search(r"Tried to allocate ([\d.]+) (\w+)", message)
    return int(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
