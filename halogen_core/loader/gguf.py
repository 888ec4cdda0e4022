"""GGUF files, versions 2 and 3, memory-mapped; every length is checked before it is believed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from halogen_core.errors import ModelError
from halogen_core.loader.failures import damaged, foreign, missing
from halogen_core.spi.arrays import Bytes
from halogen_core.spi.formats import FORMATS, WeightFormat

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
_HEADER = struct.Struct("<4sIQQ")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_MAX_DIMS = 4
_MXFP4 = WeightFormat("MXFP4", 32, 17, 39)
"""Read like the others, but claimed by name: not every backend that takes ggml's types takes it."""


@attrs.frozen
class TensorEntry:
    """One row of the tensor table; `shape` is row-major, `offset` counts from the file's start."""

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@attrs.frozen(eq=False)
class GGUFFile:
    """One opened file: metadata as written, tensors by name, and its bytes."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    data: Bytes
    """The whole file, private copy-on-write pages (torch warns of read-only ones)."""
    header_bytes: int
    """Up to here: header, metadata and tensor table."""

    def view(self, entry: TensorEntry) -> Bytes:
        """The tensor's bytes, not copied."""
        return self.data[entry.offset : entry.offset + entry.nbytes]


def read_gguf(path: Path) -> GGUFFile:
    """Open one GGUF file; raises `ModelError` for anything that is not a well-formed one."""
    buffer = _map(path)
    cursor = _Cursor(buffer, path)
    pairs, tensors = _counts(cursor)
    metadata = _metadata(cursor, pairs)
    rows = [_tensor_row(cursor) for _ in range(tensors)]
    header_bytes = cursor.position
    alignment = _alignment(cursor, metadata)
    entries = _place(cursor, rows, alignment)
    return GGUFFile(path, metadata, entries, np.frombuffer(buffer, np.uint8), header_bytes)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(4)
            if size < _HEADER.size:
                raise damaged(path, f"it has {size} bytes, the header alone takes {_HEADER.size}")
            if start != MAGIC:
                raise foreign(path, f"it starts with {start!r}, not {MAGIC!r}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as exc:
        raise missing(path, exc.strerror or str(exc)) from exc


class _Cursor:
    """Reads little-endian values in order and never past the end."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.path = path
        self.position = 0

    def fail(self, reason: str) -> ModelError:
        return damaged(self.path, reason)

    @property
    def left(self) -> int:
        return self.size - self.position

    def unpack(self, layout: struct.Struct) -> Any:
        if self.left < layout.size:
            raise self.fail(f"it ends at byte {self.size}, inside the header")
        value = layout.unpack_from(self.buffer, self.position)[0]
        self.position += layout.size
        return value

    def string(self, what: str) -> str:
        length = self.unpack(_U64)
        if length > self.left:
            raise self.fail(f"{what} claims {length} bytes, {self.left} are left")
        start = self.position
        self.position += length
        try:
            return self.buffer[start : self.position].decode()
        except UnicodeDecodeError as exc:
            raise self.fail(f"{what} is not UTF-8") from exc

    def value(self, key: str) -> Any:
        kind = self.unpack(_U32)
        if kind == _STRING:
            return self.string(f"the value of `{key}`")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.fail(f"`{key}` has the unknown value type {kind}")
        return self.unpack(_SCALARS[kind])

    def array(self, key: str) -> Any:
        """Strings become a list, numbers a numpy array (a copy: the mapping stays closable)."""
        kind, count = self.unpack(_U32), self.unpack(_U64)
        if kind == _STRING:
            return self.strings(key, count)
        if kind not in _SCALARS:
            raise self.fail(f"array `{key}` has element type {kind}, nested or unknown")
        layout = _SCALARS[kind]
        if count > self.left // layout.size:
            raise self.fail(f"array `{key}` claims {count} elements, {self.left} bytes are left")
        dtype = np.uint8 if kind == _BOOL else np.dtype(layout.format)
        values = np.frombuffer(self.buffer, dtype, count, self.position)
        self.position += count * layout.size
        return values != 0 if kind == _BOOL else values.copy()

    def strings(self, key: str, count: int) -> list[str]:
        # The one hot loop of the reader: vocabularies hold 10^5 strings.
        if count > self.left // _U64.size:
            raise self.fail(f"array `{key}` claims {count} strings, {self.left} bytes are left")
        buffer, size, unpack = self.buffer, self.size, _U64.unpack_from
        values: list[str] = []
        start = self.position
        try:
            for _ in range(count):
                end = start + 8 + unpack(buffer, start)[0]
                if end > size:
                    raise self.fail(f"string {len(values)} of `{key}` runs past the end")
                values.append(buffer[start + 8 : end].decode())
                start = end
        except (struct.error, UnicodeDecodeError) as exc:
            raise self.fail(f"string {len(values)} of `{key}` is cut short or not UTF-8") from exc
        self.position = start
        return values


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """(metadata pairs, tensors), both small enough for the file."""
    _, version, tensors, pairs = _HEADER.unpack_from(cursor.buffer)
    cursor.position = _HEADER.size
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "big-endian" if swapped in (2, 3) else f"version {version}"
        raise foreign(cursor.path, f"this GGUF file is {kind}; versions 2 and 3 are read")
    if pairs > cursor.left // _MIN_PAIR_BYTES or tensors > cursor.left // _MIN_TENSOR_BYTES:
        raise cursor.fail(
            f"it claims {pairs} metadata pairs and {tensors} tensors in {cursor.left} bytes"
        )
    return pairs, tensors


def _metadata(cursor: _Cursor, pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.string("a metadata key")
        if not key or key in metadata:
            raise cursor.fail(f"metadata key `{key}` is {'repeated' if key else 'empty'}")
        metadata[key] = cursor.value(key)
    return metadata


def _tensor_row(cursor: _Cursor) -> tuple[str, list[int], int, int]:
    """(name, dimensions with the fastest first, ggml type, offset in the data section)."""
    name = cursor.string("a tensor name")
    dims = cursor.unpack(_U32)
    if not name or not 1 <= dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor `{name}` has {dims} dimensions; 1 to {_MAX_DIMS} are allowed")
    extents = [cursor.unpack(_U64) for _ in range(dims)]
    return name, extents, cursor.unpack(_U32), cursor.unpack(_U64)


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail(f"`general.alignment` is {alignment!r}; a power of two is needed")
    return alignment


def _place(
    cursor: _Cursor, rows: list[tuple[str, list[int], int, int]], alignment: int
) -> dict[str, TensorEntry]:
    """Check the table against the file: tensors lie one after another, padded, none overlaps."""
    base = _padded(cursor.position, alignment)
    expected = 0
    entries: dict[str, TensorEntry] = {}
    for name, extents, ggml_type, offset in rows:
        if name in entries:
            raise cursor.fail(f"tensor `{name}` is repeated")
        entry = _entry(cursor, name, extents, ggml_type, base + offset)
        if offset != expected:
            raise cursor.fail(f"tensor `{name}` is at offset {offset}, {expected} is due")
        end = entry.offset + entry.nbytes
        if end > cursor.size:
            raise cursor.fail(f"tensor `{name}` ends at byte {end}, the file at {cursor.size}")
        entries[name] = entry
        expected = _padded(offset + entry.nbytes, alignment)
    return entries


def _entry(
    cursor: _Cursor, name: str, extents: list[int], ggml_type: int, offset: int
) -> TensorEntry:
    fmt = next((f for f in (*FORMATS.values(), _MXFP4) if f.ggml_type == ggml_type), None)
    if fmt is None:
        raise ModelError(
            f"tensor `{name}` of `{cursor.path}` has type {_type_name(ggml_type)}; "
            f"halogen reads {', '.join(FORMATS)}, {_MXFP4.name}",
            code="HRT-2006",
            fix="take a file quantised to one of these types, e.g. Q4_K_M or Q8_0",
        )
    if not all(extents) or extents[0] % fmt.block:
        raise cursor.fail(
            f"tensor `{name}` has dimensions {extents}; all must be positive and the first "
            f"a multiple of {fmt.block} ({fmt.name})"
        )
    return TensorEntry(name, fmt.name, tuple(extents[::-1]), offset, fmt.nbytes(prod(extents)))


def _type_name(ggml_type: int) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(ggml_type).name
    except ValueError:
        return f"{ggml_type} (unknown)"


def _padded(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
