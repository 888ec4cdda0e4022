"""Locking the working set into memory, and saying why when it cannot be done.

A page of the KV pool that was swapped out stalls a whole step. Pages that the driver gave (device
memory) are resident as long as they are ours. How mlock(2) takes their range was seen on no Strix
Halo: where the host maps them it counts nothing, so VmLck shows the host's part only; where it does
not, it refuses, and the reason says that no limit is to blame.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from halogen_core.spi import ConfigError, Reason
from halogen_rocm.platform import text

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

POLICIES = ("auto", "on", "off")
MIB = 1 << 20
IPC_LOCK = 1 << 14


@attrs.frozen(kw_only=True)
class Locked:
    """Bytes locked by this process (VmLck) and why it is less than asked."""

    bytes: int
    reason: Reason | None = None


@attrs.define
class WorkingSet:
    """What is locked; `policy` is `auto` (where it is allowed), `on` (or fail) or `off`."""

    policy: str = "auto"
    asked: int = 0
    """Bytes that were given to `add`."""
    reason: Reason | None = None
    """Why not all of them are locked."""

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Lock these; after a refusal nothing more is tried. `on` raises `ConfigError`."""
        for tensor in tensors:
            if self.policy == "off" or tensor.device.type == "meta":
                return
            self.asked += tensor.nbytes
            if self.reason is None:
                self.reason = lock(tensor.data_ptr(), tensor.nbytes).reason
                if self.reason is not None:
                    self._refused(self.reason)

    def _refused(self, reason: Reason) -> None:
        if self.policy == "on":
            raise ConfigError(reason.text, code="HRT-3414", fix=reason.hint)
        log.warning("memory is not locked: %s; %s", reason.text, reason.hint)


def policy(value: str) -> str:
    """An option's value; raises `ConfigError`."""
    if value not in POLICIES:
        raise ConfigError(
            f"backend option `mlock` is `{value}`; allowed are {', '.join(POLICIES)}",
            code="HRT-3414",
            fix="check --backend-option mlock=...",
        )
    return value


def locked_bytes(root: str = "/", process: str = "self") -> int:
    """VmLck of a process."""
    return _status(root, process, "VmLck")


def _status(root: str, process: str, name: str) -> int:
    try:
        status = Path(root, "proc", process, "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB", status, flags=re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def engines(root: str = "/") -> dict[str, tuple[int, int]]:
    """(VmRSS, VmLck) in bytes of every running engine, by process id."""
    found = {}
    for path in Path(root, "proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if b"halogen_core.engine.worker" in command:
            process = path.parent.name
            memory = (_status(root, process, name) for name in ("VmRSS", "VmLck"))
            found[process] = (next(memory), next(memory))
    return found


def lock(address: int, size: int) -> Locked:
    """mlock(2) a range; never raises."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0:
        return Locked(bytes=locked_bytes())
    return Locked(bytes=locked_bytes(), reason=lock_reason(ctypes.get_errno(), size))


def lock_reason(error: int, size: int) -> Reason:
    """Why mlock failed: the arithmetic of the limit, and the setting that raises it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    held = locked_bytes()
    told = (
        f"locking {_size(size)} failed ({os.strerror(error)}): {_size(held)} are locked, "
        f"RLIMIT_MEMLOCK is {_limit(soft)}"
    )
    short = 0 if soft == resource.RLIM_INFINITY or _above_limits() else held + size - soft
    if error == errno.ENOMEM and short <= 0:
        return Reason(
            code="memlock_unmapped",
            text=f"{told}, which is enough",
            hint="device memory that the host does not map cannot be locked, and is not swapped: "
            "--backend-option mlock=off asks for nothing",
        )
    return Reason(
        code="memlock",
        text=f"{told}, {_size(max(0, short))} too little (hard limit {_limit(hard)})",
        hint="set LimitMEMLOCK=infinity in the systemd unit, or `memlock unlimited` in "
        "/etc/security/limits.conf; in a container --ulimit memlock=-1",
    )


def _above_limits() -> bool:
    """Whether this process may lock what it likes (CAP_IPC_LOCK)."""
    told = re.search(r"^CapEff:\s+([0-9a-f]+)", text(Path("/proc/self/status")), re.MULTILINE)
    return bool(told and int(told[1], 16) & IPC_LOCK)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else _size(value)


def _size(size: int) -> str:
    return f"{size} bytes" if abs(size) < MIB else f"{size / MIB:.1f} MiB"
