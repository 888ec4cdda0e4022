"""Builds the C kernels with gcc (or $CC): into the wheel, or beside the sources when editable.

Without a compiler the package is built all the same and runs on ggml's own ops.
`python hatch_build.py` builds in place.
"""

from __future__ import annotations

import os
import platform
import shlex
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
PER_ISA = ("activations.c", "gemm.c", "attention.c", "elementwise.c", "experts.c")
ONCE = ("dispatch.c", "team.c", "pack.c", "sample.c")
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-Wall", "-fno-math-errno"]
# the portable rounding adds a constant to a product: fused, ties would go another way
SCALAR = {"scalar": ["-ffp-contract=off"]}
# a machine's instruction sets with their flags; each set has a table in csrc/dispatch.c
ISAS = {
    "x86_64": {
        "avx512": ["-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"],
        "avx2": ["-march=x86-64-v3"],
        **SCALAR,
    },
    "aarch64": {"neon_dotprod": ["-march=armv8.2-a+dotprod"], "neon": [], **SCALAR},
}
SAME_MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}


def compiler() -> list[str] | None:
    """The C compiler's command ($CC may carry arguments), if there is one."""
    command = shlex.split(os.environ.get("CC", "")) or ["gcc"]
    return command if shutil.which(command[0]) else None


def target(cc: list[str]) -> str:
    """The machine that `cc` compiles for, which need not be this one."""
    said = subprocess.run([*cc, "-dumpmachine"], capture_output=True, text=True, check=False)
    machine = said.stdout.partition("-")[0] or platform.machine()
    return SAME_MACHINE.get(machine, machine)


def wheel_platform(machine: str) -> str:
    """The platform in the name of a wheel for `machine`."""
    name, here = sysconfig.get_platform(), platform.machine()
    if SAME_MACHINE.get(here, here) != machine:
        name = name.replace(here, machine)
    return name.replace("-", "_").replace(".", "_")


def build(output: Path = OUTPUT) -> str | None:
    """Compile and link the kernels. Returns the machine they are for; None: no compiler."""
    cc = compiler()
    if cc is None:
        wanted = os.environ.get("CC", "gcc")
        print(f"no C compiler `{wanted}`: cpu_ggml will use ggml's own ops", file=sys.stderr)
        return None
    with tempfile.TemporaryDirectory() as folder:
        objects = compile_all(cc, Path(folder))
        linked = Path(folder) / "kernels.so"
        subprocess.run([*cc, "-shared", "-pthread", "-o", linked, *objects, "-lm"], check=True)
        shutil.move(linked, output)
    return target(cc)


def compile_all(cc: list[str], folder: Path) -> list[str]:
    """Object files of every kernel in each instruction set of the machine that `cc` is for."""
    isas = ISAS.get(target(cc), SCALAR)
    have = [f"-DHX_HAVE_{isa.upper()}" for isa in isas]
    jobs = [(src, "", [*FLAGS, *have]) for src in ONCE]
    for isa, flags in isas.items():
        defines = [f"-DHX_ISA={isa}", f"-DHX_{isa.upper()}"]
        jobs += [(src, isa, [*FLAGS, *flags, *defines]) for src in PER_ISA]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: _compile(cc, folder, *job), jobs))


def _compile(cc: list[str], folder: Path, source: str, isa: str, flags: list[str]) -> str:
    output = folder / f"{source}.{isa}.o"
    subprocess.run([*cc, *flags, "-c", ROOT / "csrc" / source, "-o", output], check=True)
    return str(output)


if __name__ == "__main__":
    sys.exit(0 if build() else 1)


from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # noqa: E402


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling's hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        machine = build()
        if machine:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{wheel_platform(machine)}"
            build_data["artifacts"].append("halogen_cpu_ggml/_kernels.so")
