"""ggml through ctypes: finding a library, checking it, and its functions by name.

No struct layout of ggml is copied, save the two parameter structs that its C API passes by value;
the offset of `tensor->data` is found by asking the library itself.
"""

from __future__ import annotations

import ctypes as C
import importlib.util
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs

from halogen_core.spi import BackendUnavailable

DIRECTORY_VARIABLE = "HALOGEN_GGML_DIR"
OLDEST, TOO_NEW = (0, 9), (1, 0)
F32, F16, I32, I64, BF16, I8 = 0, 1, 26, 27, 30, 24
MAX_CPUS = 512
ALL_THREADS = -1
"""`GGML_N_TASKS_MAX`: a custom op runs on every thread."""

_P, _I, _L, _F, _Z = C.c_void_p, C.c_int, C.c_int64, C.c_float, C.c_size_t
_CUSTOM = [_P, _I, _L, _L, _L, _L, _P, _I, _P, _I, _P]

_BASE: dict[str, tuple[Any, list[Any]]] = {
    "version": (C.c_char_p, []),
    "log_set": (None, [_P, _P]),
    "free": (None, [_P]),
    "tensor_overhead": (_Z, []),
    "graph_overhead_custom": (_Z, [_Z, C.c_bool]),
    "new_tensor_4d": (_P, [_P, _I, _L, _L, _L, _L]),
    "new_graph_custom": (_P, [_P, _Z, C.c_bool]),
    "build_forward_expand": (None, [_P, _P]),
    "get_data": (_P, [_P]),
    "row_size": (_Z, [_I, _L]),
    "nbytes": (_Z, [_P]),
    "custom_4d": (_P, _CUSTOM),
    "add": (_P, [_P, _P, _P]),
    "mul": (_P, [_P, _P, _P]),
    "div": (_P, [_P, _P, _P]),
    "scale": (_P, [_P, _P, _F]),
    "tanh": (_P, [_P, _P]),
    "sigmoid": (_P, [_P, _P]),
    "rms_norm": (_P, [_P, _P, _F]),
    "mul_mat": (_P, [_P, _P, _P]),
    "mul_mat_id": (_P, [_P, _P, _P, _P]),
    "mul_mat_set_prec": (None, [_P, _I]),
    "get_rows": (_P, [_P, _P, _P]),
    "set_rows": (_P, [_P, _P, _P, _P]),
    "view_4d": (_P, [_P, _P, _L, _L, _L, _L, _Z, _Z, _Z, _Z]),
    "permute": (_P, [_P, _P, _I, _I, _I, _I]),
    "cont": (_P, [_P, _P]),
    "concat": (_P, [_P, _P, _P, _I]),
    "swiglu_split": (_P, [_P, _P, _P]),
    "geglu_split": (_P, [_P, _P, _P]),
    "swiglu_oai": (_P, [_P, _P, _P, _F, _F]),
    "rope_ext": (_P, [_P, _P, _P, _P, _I, _I, _I, _F, _F, _F, _F, _F, _F]),
    "soft_max_ext": (_P, [_P, _P, _P, _F, _F]),
    "soft_max_add_sinks": (None, [_P, _P]),
    "argsort": (_P, [_P, _P, _I]),
    "sum_rows": (_P, [_P, _P]),
    "quantize_chunk": (_Z, [_I, _P, _P, _L, _L, _L, _P]),
}
_CPU: dict[str, tuple[Any, list[Any]]] = {
    "cpu_init": (None, []),
    "threadpool_free": (None, [_P]),
    "cpu_has_avx2": (_I, []),
    "cpu_has_avx512_vnni": (_I, []),
    "cpu_has_fma": (_I, []),
    "cpu_has_f16c": (_I, []),
}


class InitParams(C.Structure):
    """`ggml_init_params`."""

    _fields_ = [("mem_size", _Z), ("mem_buffer", _P), ("no_alloc", C.c_bool)]


class Plan(C.Structure):
    """`ggml_cplan`, with room behind for fields of later versions."""

    _fields_ = [
        ("work_size", _Z),
        ("work_data", _P),
        ("n_threads", _I),
        ("threadpool", _P),
        ("tail", C.c_char * 128),
    ]


class ThreadpoolParams(C.Structure):
    """`ggml_threadpool_params`."""

    _fields_ = [
        ("cpumask", C.c_bool * MAX_CPUS),
        ("n_threads", _I),
        ("prio", _I),
        ("poll", C.c_uint32),
        ("strict_cpu", C.c_bool),
        ("paused", C.c_bool),
        ("tail", C.c_char * 64),
    ]


@attrs.frozen(eq=False)
class Library:
    """One loaded ggml; `fn["mul_mat"]` is `ggml_mul_mat`."""

    directory: Path
    version: str
    fn: dict[str, Any]
    data_offset: int
    """Of `data` in `ggml_tensor`, bytes."""

    def set_data(self, tensor: int, address: int) -> None:
        """Point a tensor at memory."""
        C.c_uint64.from_address(tensor + self.data_offset).value = address


def library_directory() -> Path | None:
    """The folder of libggml: the environment's, else the package `libggml-python`'s."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        return Path(named)
    spec = importlib.util.find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    return next((root / sub for sub in ("lib64", "lib") if (root / sub).is_dir()), None)


def refuse(code: str, reason: str, fix: str) -> BackendUnavailable:
    """The error for a ggml that cannot serve."""
    return BackendUnavailable("`cpu_ggml` cannot run", reasons=[reason], code=code, fix=fix)


@lru_cache(maxsize=1)
def load() -> Library:
    """Load and check libggml once per process.

    Raises BackendUnavailable: not found (HRT-3601), a symbol missing or a version outside the
    range (HRT-3602).
    """
    directory = library_directory()
    if directory is None or not (directory / "libggml-base.so").exists():
        raise refuse(
            "HRT-3601",
            f"no libggml-base.so in `{directory}`" if directory else "libggml is not installed",
            f"pip install libggml-python, or set {DIRECTORY_VARIABLE} to a folder with libggml",
        )
    fn = _functions(directory)
    version = fn["version"]().decode()
    if not OLDEST <= _version_tuple(version) < TOO_NEW:
        raise refuse(
            "HRT-3602", f"libggml is {version}; 0.9 to 0.x are known", "install libggml-python"
        )
    fn["log_set"](C.cast(_SILENT, _P), None)
    fn["cpu_init"]()
    return Library(directory, version, fn, _find_data_offset(fn))


def _discard(level: int, text: bytes, user: Any) -> None:
    """Nothing of ggml's log is shown: what matters comes back as errors."""


_SILENT = C.CFUNCTYPE(None, _I, C.c_char_p, _P)(_discard)


def _functions(directory: Path) -> dict[str, Any]:
    base = C.CDLL(str(directory / "libggml-base.so"), mode=C.RTLD_GLOBAL)
    cpu = C.CDLL(str(directory / "libggml-cpu.so"))
    fn: dict[str, Any] = {}
    special: dict[str, tuple[C.CDLL, Any, list[Any]]] = {
        "init": (base, _P, [InitParams]),
        "graph_plan": (cpu, Plan, [_P, _I, _P]),
        "graph_compute": (cpu, _I, [_P, C.POINTER(Plan)]),
        "threadpool_params_init": (base, None, [C.POINTER(ThreadpoolParams), _I]),
        "threadpool_new": (cpu, _P, [C.POINTER(ThreadpoolParams)]),
    }
    table = [(base, n, r, a) for n, (r, a) in _BASE.items()]
    table += [(cpu, n, r, a) for n, (r, a) in _CPU.items()]
    table += [(lib, n, r, a) for n, (lib, r, a) in special.items()]
    for lib, name, result, arguments in table:
        fn[name] = _function(lib, name, result, arguments)
    return fn


def _function(lib: C.CDLL, name: str, result: Any, arguments: list[Any]) -> Any:
    symbol = f"ggml_{name}"
    try:
        function = getattr(lib, symbol)
    except AttributeError as exc:
        raise refuse(
            "HRT-3602", f"libggml has no `{symbol}`", "install libggml-python==0.20.2.post1"
        ) from exc
    function.restype, function.argtypes = result, arguments
    return function


def _version_tuple(text: str) -> tuple[int, ...]:
    return tuple(int(p) for p in text.split("-", maxsplit=1)[0].split(".") if p.isdigit())


def _find_data_offset(fn: dict[str, Any]) -> int:
    """Write a mark into each empty word of a fresh tensor until the library reads it as data."""
    context = fn["init"](InitParams(1 << 16, None, True))
    tensor = fn["new_tensor_4d"](context, F32, 8, 1, 1, 1)
    mark = 0x1122334455667788
    try:
        for offset in range(64, 400, 8):
            word = C.c_uint64.from_address(tensor + offset)
            if word.value:
                continue
            word.value = mark
            found = fn["get_data"](tensor) == mark
            word.value = 0
            if found:
                return offset
    finally:
        fn["free"](context)
    raise refuse("HRT-3602", "no data pointer found in ggml_tensor", "install libggml-python")
