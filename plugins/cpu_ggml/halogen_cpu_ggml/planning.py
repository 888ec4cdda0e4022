"""Placing buffers with known lifetimes into one arena."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class Request:
    """A buffer of `nbytes`, alive from step `born` to step `dies`, both included."""

    nbytes: int
    born: int
    dies: int


def place(requests: Sequence[Request], align: int) -> tuple[list[int], int]:
    """Offsets such that no two buffers alive together overlap, and the arena size. Bytes.

    First fit in order of birth; requests must come in that order.
    """
    offsets: list[int] = []
    live: list[tuple[int, int, int]] = []  # (offset, end, dies), by offset
    size = 0
    for request in requests:
        live = [buffer for buffer in live if buffer[2] >= request.born]
        need = -(-request.nbytes // align) * align
        offset = _first_gap(live, need)
        live.append((offset, offset + need, request.dies))
        live.sort()
        offsets.append(offset)
        size = max(size, offset + need)
    return offsets, size


def _first_gap(live: Sequence[tuple[int, int, int]], need: int) -> int:
    offset = 0
    for start, end, _ in live:
        if start - offset >= need:
            break
        offset = max(offset, end)
    return offset
