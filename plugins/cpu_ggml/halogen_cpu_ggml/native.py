"""Our C kernels: parameter structs, loading, run-time choice of instruction set."""

from __future__ import annotations

import ctypes as C

P, L, F, I = C.c_void_p, C.c_int64, C.c_float, C.c_int32  # noqa: E741


class Step(C.Structure):
    """`hx_step`: live sizes and host arrays of the step at hand."""

    _fields_ = [
        ("tokens", L),
        ("rows", L),
        ("sequences", L),
        ("positions", P),
        ("slots", P),
        ("query_start", P),
        ("seq_lens", P),
        ("block_tables", P),
        ("table_stride", L),
        ("logit_rows", P),
        ("workspace", P),
        ("workspace_bytes", L),
    ]
