"""Host memory that stands for the part's: the contents of buffers, and their element types."""

from __future__ import annotations

import mmap

import torch

TORCH = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i32": torch.int32,
    "u32": torch.uint32,
    "i64": torch.int64,
}
NUMPY = {"float32": "f32", "int32": "i32", "int64": "i64", "uint32": "u32", "uint8": "u8"}
NUMPY |= {"int8": "i8", "float16": "f16"}
LAZY_BYTES = 1 << 20
"""From here on memory is mapped without reserving it: a 60 GiB pool costs what is touched."""
_NORESERVE = 0x4000


def map_cells(nbytes: int) -> torch.Tensor:
    """Uninitialised bytes [nbytes] uint8."""
    if nbytes < LAZY_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)
