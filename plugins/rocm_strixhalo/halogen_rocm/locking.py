"""Locking the working set into memory, and saying why when it cannot be done."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import attrs

from halogen_core.spi import Reason


@attrs.frozen(kw_only=True)
class Locked:
    """Bytes locked by this process (VmLck) and why it is less than asked."""

    bytes: int
    reason: Reason | None = None


def locked_bytes(root: str = "/") -> int:
    """VmLck of this process."""
    try:
        status = Path(root, "proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = re.search(r"^VmLck:\s+(\d+) kB", status, flags=re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def lock(address: int, size: int) -> Locked:
    """mlock(2) a range; never raises."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0:
        return Locked(bytes=locked_bytes())
    return Locked(bytes=locked_bytes(), reason=lock_reason(ctypes.get_errno(), size))


def lock_reason(error: int, size: int) -> Reason:
    """Why mlock failed, with the limit and the setting that raises it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    return Reason(
        code="memlock",
        text=f"locking {size} bytes failed ({os.strerror(error)}); RLIMIT_MEMLOCK is {shown}"
        f" (hard {'unlimited' if hard == resource.RLIM_INFINITY else hard})",
        hint="set LimitMEMLOCK=infinity in the systemd unit, or `memlock unlimited` in "
        "/etc/security/limits.conf; in a container --ulimit memlock=-1",
    )
