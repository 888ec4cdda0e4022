"""Keeping weights and KV in memory (mlock), as far as the system allows."""

from __future__ import annotations

import ctypes as C
import errno
import logging
import mmap
import os
import resource
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.spi import ConfigError

logger = logging.getLogger(__name__)
CHOICES = ("auto", "on", "off")
PAGE, MIB = mmap.PAGESIZE, 1 << 20
MLOCK_ONFAULT = 1
_libc = C.CDLL(None, use_errno=True)


def do_nothing(data: NDArray[np.uint8]) -> None:
    """Lock nothing."""


@attrs.define
class Locks:
    """What is locked; `auto` locks while it may, `on` insists."""

    choice: str = "auto"
    refusal: str = ""
    """Why no more is locked, if so."""

    def hold(self, data: NDArray[np.uint8]) -> None:
        """Lock the pages of `data`, each from when it is first touched.

        Raises ConfigError (HRT-3613) with the arithmetic where `on` cannot be had.
        """
        if self.choice == "off" or self.refusal or data.nbytes == 0:
            return
        first = data.ctypes.data // PAGE * PAGE
        last = -(-(data.ctypes.data + data.nbytes) // PAGE) * PAGE
        failure = _lock(first, last - first)
        if not failure:
            return
        self.refusal = _arithmetic(last - first, failure)
        if self.choice == "on":
            raise ConfigError(
                self.refusal,
                code="HRT-3613",
                fix="raise the limit (`ulimit -l`, systemd's LimitMEMLOCK=, docker's --ulimit "
                "memlock=-1), or leave it: --backend-option mlock=off",
            )
        logger.info("memory is not locked: %s", self.refusal)


def _lock(address: int, size: int) -> int:
    """0, or the error number."""
    call: Any = getattr(_libc, "mlock2", None)
    if call is None:
        return errno.ENOSYS
    return C.get_errno() if call(C.c_void_p(address), C.c_size_t(size), MLOCK_ONFAULT) else 0


def _arithmetic(size: int, failure: int) -> str:
    limit, used = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], locked_bytes()
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / MIB:.1f} MiB"
    return (
        f"cannot lock {size / MIB:.1f} MiB more ({os.strerror(failure)}): RLIMIT_MEMLOCK is "
        f"{allowed}, {used / MIB:.1f} MiB of it in use, "
        f"{(used + size) / MIB:.1f} MiB or more are needed"
    )


def locked_bytes() -> int:
    """Bytes that this process has locked, by /proc/self/status."""
    try:
        with open("/proc/self/status", encoding="utf-8") as lines:
            found = next((ln for ln in lines if ln.startswith("VmLck:")), "VmLck: 0")
    except OSError:
        return 0
    return int(found.split()[1]) * 1024
