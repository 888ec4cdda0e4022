"""Repairs of Triton's interpreter, applied when TRITON_INTERPRET=1 (tests on machines without GPU).

Up to Triton 3.9 it multiplies the raw bit patterns of bfloat16 in `tl.dot`, and a mask made from a
scalar and a tensor condition comes out as int32, which masked loads and stores refuse.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np


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
    dot = builder.create_dot

    def widen(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16 or x.data.dtype != np.uint16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        return dot(self, widen(a), widen(b), *rest, **named)

    def boolean_mask(function: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(self: Any, pointers: Any, *rest: Any, **named: Any) -> Any:
            arguments = list(rest)
            mask = arguments[position]
            if isinstance(mask, handle) and mask.data.dtype != np.bool_:
                arguments[position] = handle(mask.data.astype(np.bool_), tl.int1)
            return function(self, pointers, *arguments, **named)

        return call

    builder.create_dot = create_dot
    builder.create_masked_load = boolean_mask(builder.create_masked_load, 0)
    builder.create_masked_store = boolean_mask(builder.create_masked_store, 1)
    builder.halogen_repaired = True
