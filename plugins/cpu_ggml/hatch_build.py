"""Builds the C kernels with gcc (or $CC): into the wheel, or beside the sources when editable.

Without a compiler the package is built all the same and runs on ggml's own ops.
`python hatch_build.py` builds in place.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
OUTPUT = ROOT / "halogen_cpu_ggml" / "_kernels.so"
PER_ISA = ("gemm.c", "attention.c", "elementwise.c", "experts.c")
ONCE = ("dispatch.c", "team.c", "pack.c", "sample.c")
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror", "-fno-math-errno"]
X86_ISAS = {
    "avx512": ["-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"],
    "avx2": ["-march=x86-64-v3"],
    "scalar": [],
}


def isas() -> dict[str, list[str]]:
    """Instruction sets to build for on this kind of machine, with their flags."""
    return X86_ISAS if platform.machine() in ("x86_64", "AMD64") else {"scalar": []}


def compiler() -> str | None:
    """The C compiler, if there is one."""
    return shutil.which(os.environ.get("CC", "gcc"))


def build(output: Path = OUTPUT) -> bool:
    """Compile and link the kernels; False: no compiler."""
    cc = compiler()
    if cc is None:
        print("no C compiler: halogen-cpu-ggml will use ggml's own ops", file=sys.stderr)
        return False
    have = [f"-DHX_HAVE_{isa.upper()}" for isa in isas()]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(src, "", [*FLAGS, *have]) for src in ONCE]
        for isa, flags in isas().items():
            defines = [f"-DHX_ISA={isa}", f"-DHX_{isa.upper()}"]
            jobs += [(src, isa, [*FLAGS, *flags, *defines]) for src in PER_ISA]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda job: _compile(cc, Path(folder), *job), jobs))
        linked = Path(folder) / "kernels.so"
        subprocess.run([cc, "-shared", "-pthread", "-o", linked, *objects, "-lm"], check=True)
        shutil.move(linked, output)
    return True


def _compile(cc: str, folder: Path, source: str, isa: str, flags: list[str]) -> str:
    target = folder / f"{source}.{isa}.o"
    subprocess.run([cc, *flags, "-c", ROOT / "csrc" / source, "-o", target], check=True)
    return str(target)


if __name__ == "__main__":
    sys.exit(0 if build() else 1)


from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # noqa: E402


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling's hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if build():
            target = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{target}"
            build_data["artifacts"].append("halogen_cpu_ggml/_kernels.so")
