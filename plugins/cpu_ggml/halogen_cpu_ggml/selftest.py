"""Does this library compute on this CPU? A small matmul in each way that steps will use."""

from __future__ import annotations

import attrs
import numpy as np

from halogen_core.spi import Reason
from halogen_cpu_ggml import binding
from halogen_cpu_ggml.recorder import Recorder, weight_tensor
from halogen_cpu_ggml.tape import host_node, view_f32
from halogen_cpu_ggml.threads import Team, usable_threads
from halogen_cpu_ggml.weights import Part

X86_BUILD_NEEDS = ("avx2", "fma", "f16c")


@attrs.frozen
class Report:
    """What a probe found."""

    version: str
    summary: str
    reasons: tuple[Reason, ...] = ()


def inspect_machine() -> Report:
    """Load, check CPU features against the library's build, compute once.

    Raises BackendUnavailable (HRT-3601, HRT-3602).
    """
    lib = binding.load()
    _check_features(lib)
    _multiply(lib)
    summary = f"CPU, {usable_threads()} threads, ggml {lib.version}"
    return Report(lib.version, summary)


def _check_features(lib: binding.Library) -> None:
    """A library built for more than this CPU would die of an illegal instruction."""
    flags = cpu_flags()
    built = [f for f in X86_BUILD_NEEDS if lib.fn[f"cpu_has_{f}"]()]
    missing = [f for f in built if flags and f not in flags]
    if missing:
        raise binding.refuse(
            "HRT-3602",
            f"libggml is built for {', '.join(missing)}, which this CPU lacks",
            f"point {binding.DIRECTORY_VARIABLE} to a build for this CPU",
        )


def cpu_flags(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """Feature names as Linux tells them; empty where it does not."""
    try:
        with open(path, encoding="utf-8") as lines:
            found = next((ln for ln in lines if ln.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    return frozenset(found.partition(":")[2].split())


def _multiply(lib: binding.Library) -> None:
    recorder = Recorder(lib, Team(lib, 1, pinned=False))
    w = np.arange(32, dtype=np.float32).reshape(4, 8)
    x = np.ones((2, 8), np.float32)
    part = Part("F32", binding.F32, (4, 8), w.reshape(-1).view(np.uint8))
    with recorder.tape() as tape:
        out = tape.op("mul_mat", weight_tensor(tape, part), host_node(x), shape=(2, 4))
    if not np.array_equal(view_f32(out), x @ w.T):
        raise binding.refuse("HRT-3602", "ggml's matmul gives wrong numbers here", "reinstall it")
