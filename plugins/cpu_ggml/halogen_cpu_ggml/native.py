"""Our C kernels: parameter structs as in `csrc/hx.h`, loading, choice of instruction set."""

from __future__ import annotations

import ctypes as C
import platform
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs

from halogen_core.spi import BackendUnavailable, PluginError

LIBRARY = Path(__file__).parent / "_kernels.so"
REBUILD = "reinstall halogen-cpu-ggml or run hatch_build.py"
_P, _L, _F = C.c_void_p, C.c_int64, C.c_float

ISAS = {"x86_64": ("avx512", "avx2"), "aarch64": ("neon_dotprod", "neon")}
"""By machine, best first; every machine has `scalar` too."""
SAME_MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}

FORMATS = {
    name: i
    for i, name in enumerate(
        ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
    )
}
FLOAT_FORMATS = ("F32", "F16", "BF16")
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 2, "f8_e5m2": 3, "q8_0": 4}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_oai": 2}
ACTIVATION_BLOCK, ACTIVATION_BLOCK_BYTES = 32, 56
CHUNK, MOST_ROWS, TILE, GROUP = 256, 12, 16, 16
LONGEST_HEAD = 1024
MOST_PARTS = 4
"""Stacks of experts in one product."""


def activation_bytes(k: int) -> int:
    """Bytes of a row of k activations in 8-bit panels (`hx_q8_bytes`)."""
    blocks = k // ACTIVATION_BLOCK
    return blocks * ACTIVATION_BLOCK_BYTES + -(-blocks // 4) * 4


def _struct(name: str, *fields: tuple[str, Any]) -> Any:
    return type(name, (C.Structure,), {"_fields_": list(fields)})


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, _P) for name in names]


class Step(C.Structure):
    """`hx_step`: live sizes and host arrays of the step at hand."""

    _fields_ = [
        ("tokens", _L),
        ("rows", _L),
        ("sequences", _L),
        *_pointers("positions", "slots", "query_start", "seq_lens", "block_tables"),
        ("table_stride", _L),
        *_pointers("logit_rows", "workspace"),
        ("workspace_bytes", _L),
    ]


class Pool(C.Structure):
    """`hx_pool`: one layer of the tiled KV pool."""

    _fields_ = [
        *_pointers("k", "v"),
        *((n, _L) for n in ("type", "block", "hkv", "d", "dp", "k_tile", "v_row", "group")),
    ]


class PartTiles(C.Structure):
    """`hx_part`."""

    _fields_ = [*_pointers("x", "tiles"), ("format", _L), ("n", _L), ("column", _L)]


PackX = _struct("PackX", ("rows", _P), ("x", _P), ("k", _L), ("out", _P))
Linear = _struct(
    "Linear",
    ("rows", _P),
    ("k", _L),
    ("out", _P),
    ("stride", _L),
    ("bias", _P),
    ("scale", _F),
    ("softcap", _F),
    ("nparts", _L),
    ("parts", _P),
)
Norm = _struct(
    "Norm",
    *_pointers("rows", "x", "residual", "weight", "out", "sum"),
    ("width", _L),
    ("eps", _F),
    ("packed", _P),
)
Gate = _struct(
    "Gate", *_pointers("rows", "gate_up", "out"), ("width", _L), ("kind", _L), ("packed", _P)
)
Angles = _struct("Angles", *_pointers("step", "inv_freq"), ("dim", _L), ("factor", _F), ("out", _P))
Store = _struct(
    "Store",
    *_pointers("step", "qkv", "angles", "q_norm", "k_norm", "out"),
    *((n, _L) for n in ("hq", "dim", "interleaved")),
    ("eps", _F),
    ("pool", Pool),
)
Attend = _struct(
    "Attend",
    *_pointers("step", "q", "sinks", "out"),
    ("hq", _L),
    ("window", _L),
    ("scale", _F),
    ("softcap", _F),
    ("pool", Pool),
    ("packed", _P),
)
Sample = _struct(
    "Sample",
    *_pointers("rows", "logits"),
    ("vocab", _L),
    *_pointers("scratch", "temperature", "top_p", "min_p", "repetition", "presence", "frequency"),
    *_pointers("uniforms", "top_k", "forced", "history_start", "history_ids", "history_counts"),
    *_pointers("bias_start", "bias_ids", "bias_values", "mask", "out"),
)
Rows = _struct("Rows", *_pointers("step", "x", "out"), ("width", _L))
Choose = _struct(
    "Choose",
    *_pointers("rows", "logits"),
    *((n, _L) for n in ("experts", "top", "sigmoid", "normalise")),
    ("scale", _F),
    *_pointers("chosen", "share"),
)
Group = _struct(
    "Group",
    *_pointers("rows", "chosen"),
    ("experts", _L),
    ("top", _L),
    *_pointers("start", "total", "order", "place"),
)
Regroup = _struct(
    "Regroup",
    ("start", _P),
    ("experts", _L),
    ("order", _P),
    ("top", _L),
    ("x", _P),
    ("k", _L),
    ("floats", _L),
    ("out", _P),
)
Experts = _struct(
    "Experts",
    ("start", _P),
    ("experts", _L),
    ("k", _L),
    ("out", _P),
    ("stride", _L),
    ("nparts", _L),
    ("parts", _P),
)
Combine = _struct(
    "Combine", ("rows", _P), ("top", _L), ("width", _L), *_pointers("place", "share", "x", "out")
)


class Op(C.Structure):
    """`hx_op`: a kernel of the table and its parameters."""

    _fields_ = _pointers("kernel", "params")


class Program(C.Structure):
    """`hx_program`: kernels that run one after another within one ggml node."""

    _fields_ = [*_pointers("team", "ops"), *((n, _L) for n in ("n", "arrived", "left"))]


class Table(C.Structure):
    """`hx_table`: the kernels of one instruction set, as addresses."""

    _fields_ = [
        ("isa", C.c_char_p),
        ("panel", _L),
        *_pointers("pack_q8", "pack_f32", "linear", "norm", "gate"),
        *_pointers("angles", "store", "attend", "sample", "rows"),
        *_pointers("choose", "group", "regroup", "experts", "combine"),
    ]


_SIZES = {
    "hx_step": Step,
    "hx_pack_x": PackX,
    "hx_part": PartTiles,
    "hx_linear": Linear,
    "hx_norm": Norm,
    "hx_gate": Gate,
    "hx_angles": Angles,
    "hx_pool": Pool,
    "hx_store": Store,
    "hx_attend": Attend,
    "hx_sample": Sample,
    "hx_rows": Rows,
    "hx_choose": Choose,
    "hx_group": Group,
    "hx_regroup": Regroup,
    "hx_experts": Experts,
    "hx_combine": Combine,
    "hx_op": Op,
    "hx_program": Program,
    "hx_table": Table,
}


@attrs.frozen(eq=False)
class Kernels:
    """The kernels in use."""

    library: C.CDLL
    table: Any

    @property
    def isa(self) -> str:
        """Their instruction set, one of `ISAS`."""
        name: bytes = self.table.isa
        return name.decode()

    def tile_bytes(self, fmt: str, k: int) -> int:
        """Bytes of a tile of 16 output features with k inputs."""
        return int(self.library.hx_tile_size(FORMATS[fmt], k))

    def pack_tiles(self, fmt: str, raw: int, shape: tuple[int, int], out: int, span: range) -> None:
        """Tiles `span` of the matrix [n, k] at address `raw`."""
        n, k = shape
        self.library.hx_pack_tiles(FORMATS[fmt], raw, n, k, out, span.start, span.stop)


@attrs.define(eq=False)
class Crew:
    """The threads that run programs; they sleep between steps."""

    library: C.CDLL
    address: int
    cpus: Any

    @classmethod
    def start(cls, kernels: Kernels, threads: int, cpus: Sequence[int]) -> Crew:
        """`threads` with the caller's own, thread i on `cpus[i]` if there are any.

        Raises BackendUnavailable (HRT-3612) when the system gives no thread.
        """
        array = (C.c_int * threads)(*cpus[:threads]) if len(cpus) >= threads else None
        address = kernels.library.hx_team_new(threads, array)
        crew = cls(kernels.library, address or 0, array)
        if not address or kernels.library.hx_team_threads(address) < threads:
            crew.stop()
            raise BackendUnavailable(
                "`cpu_ggml` cannot run",
                reasons=[f"the system refuses {threads} threads"],
                code="HRT-3612",
                fix="set --threads to fewer",
            )
        return crew

    def program(self, steps: Sequence[tuple[int, C.Structure]]) -> Program:
        """Kernels and their parameters (kept by the caller) as one."""
        ops = (Op * len(steps))(*((k, C.addressof(p)) for k, p in steps))
        program = Program(team=self.address, ops=C.addressof(ops), n=len(steps))
        program.kept = ops
        return program

    @property
    def entry(self) -> int:
        """The ggml custom op that runs a program."""
        return C.cast(self.library.hx_run_program, C.c_void_p).value or 0

    def stop(self) -> None:
        """End the threads."""
        if self.address:
            self.library.hx_team_free(self.address)
            self.address = 0


@lru_cache(maxsize=1)
def _library() -> C.CDLL | None:
    if not LIBRARY.exists():
        return None
    try:
        lib = C.CDLL(str(LIBRARY))
    except OSError as exc:
        raise PluginError(
            f"the compiled kernels cannot be loaded ({exc}); they may be for another machine",
            code="HRT-3611",
            fix=REBUILD,
        ) from exc
    try:
        _declare(lib)
    except AttributeError as exc:
        raise _stale(f"lack a function ({exc})") from exc
    for name, struct in _SIZES.items():
        if lib.hx_struct_size(name.encode()) != C.sizeof(struct):
            raise _stale(f"disagree about `{name}`")
    return lib


def _declare(lib: C.CDLL) -> None:
    """Types of what is called; raises `AttributeError` for what an older build does not have."""
    lib.hx_kernels.restype, lib.hx_kernels.argtypes = C.POINTER(Table), [C.c_char_p]
    lib.hx_struct_size.restype, lib.hx_struct_size.argtypes = _L, [C.c_char_p]
    lib.hx_tile_size.restype, lib.hx_tile_size.argtypes = _L, [_L, _L]
    lib.hx_pack_tiles.restype, lib.hx_pack_tiles.argtypes = None, [_L, _P, _L, _L, _P, _L, _L]
    lib.hx_team_new.restype, lib.hx_team_new.argtypes = _P, [C.c_int, _P]
    lib.hx_team_free.restype, lib.hx_team_free.argtypes = None, [_P]
    lib.hx_team_threads.restype, lib.hx_team_threads.argtypes = C.c_int, [_P]


def _stale(how: str) -> PluginError:
    text = f"the compiled kernels {how}: they are from another version"
    return PluginError(text, code="HRT-3611", fix=REBUILD)


def isas(machine: str) -> tuple[str, ...]:
    """Instruction sets that kernels are written for, as `platform.machine()` names the machine."""
    return (*ISAS.get(SAME_MACHINE.get(machine, machine), ()), "scalar")


def runnable() -> tuple[str, ...]:
    """Instruction sets that are built and that this CPU has."""
    return tuple(isa for isa in isas(platform.machine()) if kernels(isa))


def kernels(isa: str) -> Kernels | None:
    """The kernels for `isa` (`auto`: the best of this CPU); None: not built, or not for here."""
    lib = _library()
    if lib is None:
        return None
    table = lib.hx_kernels(isa.encode())
    return Kernels(lib, table.contents) if table else None
