"""Repairs of Triton's interpreter, applied when TRITON_INTERPRET=1 (tests on machines without GPU).

Up to Triton 3.9 it multiplies the raw bit patterns of bfloat16 in `tl.dot`, and a mask made from a
scalar and a tensor condition comes out as int32, which masked loads and stores refuse. It cuts
float32 off to bfloat16, where hardware rounds to the nearest, and takes integers for its bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def active() -> bool:
    """Whether kernels imported now run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def repair() -> None:
    """Patch the interpreter once; does nothing outside it."""
    if not active():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "halogen_repaired", False):
        return
    handle = interpreter.TensorHandle
    dot, cast = builder.create_dot, builder.cast_impl

    def widen(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16 or x.data.dtype != np.uint16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        return dot(self, widen(a), widen(b), *rest, **named)

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        exact = source.dtype.scalar == tl.float32 or source.dtype.scalar.is_int()
        if exact and kind.scalar == tl.bfloat16:
            return handle(rounded(source.data), kind.scalar)
        return cast(self, source, kind)

    builder.create_dot = create_dot
    builder.cast_impl = cast_impl
    builder.create_masked_load = _boolean_mask(handle, builder.create_masked_load, 0)
    builder.create_masked_store = _boolean_mask(handle, builder.create_masked_store, 1)
    builder.halogen_repaired = True


def _boolean_mask(handle: Any, function: Callable[..., Any], position: int) -> Callable[..., Any]:
    """`function` with the argument at `position` after the pointers made boolean."""
    import triton.language as tl

    def call(self: Any, pointers: Any, *rest: Any, **named: Any) -> Any:
        arguments = list(rest)
        mask = arguments[position]
        if isinstance(mask, handle) and mask.data.dtype != np.bool_:
            arguments[position] = handle(mask.data.astype(np.bool_), tl.int1)
        return function(self, pointers, *arguments, **named)

    return call


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bfloat16 values (ties to even) as bits; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
    kept = np.where(np.isnan(values), np.uint32(0x7FC00000), nearest)
    return (kept >> np.uint32(16)).astype(np.uint16)
