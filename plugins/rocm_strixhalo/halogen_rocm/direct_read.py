"""Reading weights past the page cache, so that loading does not evict what the host works with.

The GPU never reads a memory map of the file: on gfx1151 that was seen to give wrong data and hangs.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 4096
CHUNK = 64 << 20


def read_span(path: str, offset: int, size: int) -> NDArray[np.uint8]:
    """`size` bytes of a file from `offset`, by O_DIRECT where the file system has it."""
    out = np.empty(size, np.uint8)
    if size == 0:
        return out
    flag = getattr(os, "O_DIRECT", 0)
    for flags in (os.O_RDONLY | flag, os.O_RDONLY):
        try:
            _read(path, flags, offset, out)
        except OSError:
            if flags == os.O_RDONLY:
                raise
            continue
        break
    return out


def _read(path: str, flags: int, offset: int, out: NDArray[np.uint8]) -> None:
    """Aligned reads through a page-aligned buffer into `out`."""
    start = offset // ALIGNMENT * ALIGNMENT
    end = offset + len(out)
    descriptor = os.open(path, flags)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        # an anonymous map is page-aligned, which O_DIRECT asks for
        buffer = stack.enter_context(mmap.mmap(-1, CHUNK))
        view = memoryview(buffer)
        stack.callback(view.release)
        at = start
        while at < end:
            want = min(CHUNK, -(-(end - at) // ALIGNMENT) * ALIGNMENT)
            got = os.preadv(descriptor, [view[:want]], at)
            if got <= 0:
                raise OSError(f"`{path}` ends at {at}, wanted {end}")
            low, high = max(at, offset), min(at + got, end)
            source = np.frombuffer(view, np.uint8, count=high - low, offset=low - at)
            out[low - offset : high - offset] = source
            del source
            at += got


def file_span(data: NDArray[Any]) -> tuple[str, int] | None:
    """(path, offset) of an array that lies in a memory-mapped file; None: it does not.

    The kernel's own list of mappings is asked: a numpy view forgets which file it came from. A file
    that was replaced or removed since is none: its path has other bytes now, the map still its own.
    """
    address = data.__array_interface__["data"][0]
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, _, rest = line.partition(" ")
            low, high = (int(part, 16) for part in span.split("-"))
            if low <= address and address + data.nbytes <= high:
                _, offset, _, inode, *path = rest.split(maxsplit=4)
                name = path[0].rstrip("\n") if path else ""
                return (name, int(offset, 16) + address - low) if _is(name, int(inode)) else None
    return None


def _is(path: str, inode: int) -> bool:
    """Whether the file at `path` is still the one that was mapped."""
    try:
        return path.startswith("/") and os.stat(path).st_ino == inode
    except OSError:
        return False
