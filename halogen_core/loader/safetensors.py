"""Safetensors files, memory-mapped; every length is checked before it is believed.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from halogen_core.loader.failures import damaged, missing
from halogen_core.spi.arrays import Bytes

_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 8
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "F8_E5M2FNUZ": 1, "F8_E4M3FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@attrs.frozen
class SafetensorsEntry:
    """One tensor; `dtype` as the file spells it, `offset` from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@attrs.frozen(eq=False)
class SafetensorsFile:
    """One opened file."""

    path: Path
    tensors: Mapping[str, SafetensorsEntry]
    data: Bytes
    header_bytes: int

    def view(self, name: str) -> Bytes:
        """The tensor's bytes, not copied."""
        entry = self.tensors[name]
        return self.data[entry.offset : entry.offset + entry.nbytes]


def read_safetensors(path: Path) -> SafetensorsFile:
    """Open one file; raises `ModelError` for anything that is not a well-formed one."""
    buffer = _map(path)
    length = int.from_bytes(buffer[:8], "little")
    if length > min(len(buffer) - 8, _MAX_HEADER_BYTES):
        raise damaged(path, f"its header claims {length} bytes, the file has {len(buffer)}")
    start = 8 + length
    table = _header(path, buffer[8:start])
    table.pop("__metadata__", None)
    entries = {name: _entry(path, name, row, start) for name, row in table.items()}
    _check_layout(path, entries, start, len(buffer))
    return SafetensorsFile(path, entries, np.frombuffer(buffer, np.uint8), start)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 10:
                raise damaged(path, f"it has {size} bytes, less than the smallest header")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as exc:
        raise missing(path, exc.strerror or str(exc)) from exc


def _header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise damaged(path, "its header repeats a name")
        return table

    try:
        table = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as exc:
        raise damaged(path, "its header is not JSON") from exc
    if not isinstance(table, dict):
        raise damaged(path, "its header is not a JSON object")
    return table


def _entry(path: Path, name: str, row: Any, base: int) -> SafetensorsEntry:
    try:
        dtype, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
        item_bytes = _ITEM_BYTES[dtype]
    except (KeyError, TypeError, ValueError) as exc:
        raise damaged(path, f"the header's row of `{name}` is malformed") from exc
    numbers = (*shape, begin, end)
    if len(shape) > _MAX_DIMS or any(type(n) is not int or n < 0 for n in numbers):
        raise damaged(path, f"tensor `{name}` has shape {list(shape)[:9]}, offsets {begin}, {end}")
    nbytes = prod(shape) * item_bytes
    if end - begin != nbytes:
        raise damaged(path, f"tensor `{name}` has {end - begin} bytes, its shape takes {nbytes}")
    return SafetensorsEntry(dtype, shape, base + begin, nbytes)


def _check_layout(
    path: Path, entries: Mapping[str, SafetensorsEntry], start: int, size: int
) -> None:
    """Tensors cover the data section without overlap or hole, as the format demands."""
    due = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != due:
            raise damaged(path, f"tensor `{name}` starts at byte {entry.offset}, {due} is due")
        due += entry.nbytes
    if due != size:
        raise damaged(path, f"its tensors end at byte {due}, the file at {size}")
