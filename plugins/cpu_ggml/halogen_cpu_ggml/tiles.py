"""Weights in the kernels' order, and giving the file's pages back afterwards."""

from __future__ import annotations

import ctypes as C
import math
import mmap
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_cpu_ggml.locking import do_nothing
from halogen_cpu_ggml.native import TILE, Kernels
from halogen_cpu_ggml.weights import Part

PAGE = mmap.PAGESIZE
MADV_DONTNEED, MADV_HUGEPAGE = 4, 14
HUGE = 2 << 20
SLAB = 16 << 20
_libc = C.CDLL(None, use_errno=True)


@attrs.frozen(eq=False)
class Tiles:
    """A matrix [n, k] (or a stack of experts of it) as tiles of 16 output features."""

    format: str
    n: int
    k: int
    data: NDArray[np.uint8]

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)


@attrs.define(eq=False)
class Slabs:
    """Memory for weights. Small matrices share slabs of huge pages: one core reads those 1.6 times
    as fast as small pages.
    """

    slab: NDArray[np.uint8] = attrs.field(factory=lambda: np.zeros(0, np.uint8))
    used: int = 0
    hold: Callable[[NDArray[np.uint8]], None] = do_nothing
    """What is done with new memory: locking it."""

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeroed bytes at a multiple of 64."""
        if nbytes > SLAB // 4:
            return self._new(nbytes)
        if self.used + nbytes > len(self.slab):
            self.slab, self.used = self._new(SLAB), 0
        out = self.slab[self.used : self.used + nbytes]
        self.used += -(-nbytes // 64) * 64
        return out

    def _new(self, nbytes: int) -> NDArray[np.uint8]:
        out = huge_zeros(nbytes)
        self.hold(out)
        return out


def make_tiles(kernels: Kernels, slabs: Slabs, part: Part, threads: int) -> Tiles:
    """Lay a part out for the kernels, then let go of the file's pages that were read for it."""
    experts = math.prod(part.shape[:-2])
    n, k = part.outputs, part.inputs
    count = -(-n // TILE)
    per = count * kernels.tile_bytes(part.format, k)
    data = slabs.take(experts * per)
    raw, rows = part.data.ctypes.data, part.data.nbytes // experts

    def work(expert: int, span: range) -> None:
        kernels.pack_tiles(
            part.format, raw + expert * rows, (n, k), data.ctypes.data + expert * per, span
        )

    if threads == 1 or experts * per < HUGE:
        for e in range(experts):
            work(e, range(count))
    else:
        step = -(-count // threads)
        with ThreadPoolExecutor(threads) as pool:
            spans = [range(i, min(i + step, count)) for i in range(0, count, step)]
            list(pool.map(lambda job: work(*job), [(e, s) for e in range(experts) for s in spans]))
    release_file_pages(part.data)
    return Tiles(part.format, n, k, data)


def huge_zeros(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed bytes that take memory when touched, in huge pages where the system gives them."""
    align = HUGE if nbytes >= 2 * HUGE else 64
    raw = np.zeros(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    out = raw[start : start + nbytes]
    if align == HUGE:
        _libc.madvise(C.c_void_p(out.ctypes.data), C.c_size_t(nbytes), MADV_HUGEPAGE)
    return out


def release_file_pages(data: NDArray[np.uint8]) -> None:
    """Drop resident pages of `data` if they are clean pages of a private file mapping.

    They come back from the page cache when read again; anonymous memory is left alone.
    """
    first = -(-data.ctypes.data // PAGE) * PAGE
    last = (data.ctypes.data + data.nbytes) // PAGE * PAGE
    if last > first and file_mapping(first, last) is not None:
        _drop(first, last)


def _drop(first: int, last: int) -> None:
    _libc.madvise(C.c_void_p(first), C.c_size_t(last - first), MADV_DONTNEED)


@attrs.define
class Tables:
    """Embedding tables that are looked up in the model's file: after a step its pages are given
    back.

    A look-up maps up to 2 MiB around its row, so that much of the file would soon be resident
    beside the tiles. To give back and to map again costs some microseconds.
    """

    files: list[tuple[weakref.ref[Part], int, int]] = attrs.field(factory=list)

    def add(self, part: Part) -> None:
        """Watch the mapping that a table lies in, while the table lives."""
        first = part.data.ctypes.data
        found = file_mapping(first, first + part.data.nbytes)
        if found is not None:
            self.files.append((weakref.ref(part), *found))

    def give_back(self) -> None:
        """The pages that look-ups have mapped."""
        for part, low, high in self.files:
            if part() is not None:
                _drop(low, high)


def file_mapping(first: int, last: int) -> tuple[int, int] | None:
    """The mapping of a file that first .. last lies in, by /proc/self/maps."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as lines:
            for line in lines:
                span, _, _, _, inode, *_ = line.split(maxsplit=5)
                low, high = (int(x, 16) for x in span.split("-"))
                if low <= first < high:
                    return (low, high) if last <= high and int(inode) != 0 else None
    except OSError:
        pass
    return None
