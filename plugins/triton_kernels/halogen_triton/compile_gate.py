"""Compile every shipped launch ahead of time, without a GPU, and read what the compiler says.

The host wrappers run on meta tensors while launches are recorded instead of made, so exactly what
would run is compiled: same constants, same specialisation. For gfx1151 that depends on the size of
tensors (`FORMS`). `python -m halogen_triton.compile_gate` prints the table as JSON; with `--check`
it says which launches spill, in every form, and ends with 1 where one does.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch
import triton
from torch import Tensor

TARGETS = {"gfx1151": ("hip", "gfx1151", 32), "sm_90": ("cuda", 90, 32)}
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
}
FORMS = ("shipped", "small", "large")
"""What Triton's HIP launcher finds of a launch's tensors. It tells the compiler which of them have
a storage under 2 GiB: these get buffer instructions, and with them other registers. `shipped`: as
large as the case has them (a KV pool over 2 GiB, all else under it); `small`: all under 2 GiB;
`large`: weights, caches and their scales over it."""
_BUFFER_LIMIT = 2**31 - 1
_GROWING = frozenset({"k", "ks", "v", "vs", "cache", "weight", "codes", "high", "scales", "supers"})
_OPTIONS = ("num_warps", "num_stages", "waves_per_eu", "launch_pdl")


@attrs.frozen(eq=False)
class Launched:
    """One recorded launch."""

    name: str
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@attrs.frozen
class Resources:
    """What the compiler gave a kernel."""

    registers: int
    spills: int
    """Spilled registers (gfx1151), bytes of spill (sm_90)."""
    scratch: int
    """Bytes of private memory per thread."""
    shared: int
    """Bytes of LDS or shared memory per workgroup."""
    matrix: int
    """Matrix instructions: v_wmma, or mma and wgmma."""
    wide_loads: int
    """Global loads of 16 bytes."""
    loads: int
    warps: int
    occupancy: int = 0
    """Waves per SIMD by registers (gfx1151)."""


def record(name: str, call: Callable[[], object]) -> list[Launched]:
    """The launches that `call` would make."""
    from triton.runtime.jit import JITFunction

    made: list[Launched] = []
    run = JITFunction.run

    def keep(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {key: named.pop(key) for key in _OPTIONS if key in named}
        arguments = dict(zip(self.arg_names, args, strict=False)) | named
        made.append(Launched(f"{name}/{self.__name__}", self, arguments, options))

    JITFunction.run = keep
    try:
        call()
    finally:
        JITFunction.run = run
    return made


def compile_launch(launched: Launched, target: str, form: str = "shipped") -> Any:
    """The compiled kernel for an arch, in one of `FORMS`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, param in enumerate(launched.kernel.params):
        value = launched.arguments[param.name]
        specialised = type(value) is int and not param.do_not_specialize
        if param.is_constexpr or value is None or (specialised and value == 1):
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        signature[param.name] = _type_of(value)
        if isinstance(value, Tensor) or (specialised and value % 16 == 0):
            hints[(index,)] = [["tt.divisibility", 16]]
        if TARGETS[target][0] == "hip" and _within_reach(param.name, value, form):
            hints[(index,)].append(["tt.pointer_range", 32])
    kind = GluonASTSource if launched.kernel.is_gluon() else ASTSource
    source = kind(fn=launched.kernel, signature=signature, constexprs=constants, attrs=hints)
    options = dict(launched.options)
    if target == "gfx1151":
        options.pop("launch_pdl", None)
    else:
        options.pop("waves_per_eu", None)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def _within_reach(name: str, value: Any, form: str) -> bool:
    """Whether an argument is a tensor all of whose storage 32-bit offsets reach."""
    if not isinstance(value, Tensor) or (form == "large" and name in _GROWING):
        return False
    return form == "small" or value.untyped_storage().size() <= _BUFFER_LIMIT


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    if hasattr(value, "block_shape"):
        box = ",".join(map(str, value.block_shape))
        return f"tensordesc<{_TYPES[value.base.dtype]}[{box}],{value.layout!r}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def resources(binary: Any, target: str) -> Resources:
    """Registers, spills, memory and instruction counts of a compiled kernel."""
    if target == "gfx1151":
        return _amd_resources(binary)
    return _nvidia_resources(binary)


def _amd_resources(binary: Any) -> Resources:
    asm = binary.asm["amdgcn"]

    def number(pattern: str) -> int:
        found = re.search(pattern + r":\s+(\d+)", asm)
        return int(found.group(1)) if found else 0

    registers = number(r"\.vgpr_count")
    return Resources(
        registers=registers,
        spills=number(r"\.vgpr_spill_count") + number(r"\.sgpr_spill_count"),
        scratch=number(r"\.private_segment_fixed_size"),
        shared=binary.metadata.shared,
        matrix=len(re.findall(r"v_wmma_", asm)),
        wide_loads=len(re.findall(r"(?:global|buffer)_load_b128", asm)),
        loads=len(re.findall(r"(?:global|buffer)_load_", asm)),
        warps=binary.metadata.num_warps,
        # 1536 registers per SIMD lane, given in granules of 24, at most 16 waves
        occupancy=min(16, 1536 // max(24, -(-registers // 24) * 24)),
    )


def _nvidia_resources(binary: Any) -> Resources:
    ptx = binary.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage)}
    return Resources(
        registers=numbers.get("REG", 0),
        spills=numbers.get("LOCAL", 0),
        scratch=numbers.get("STACK", 0),
        shared=binary.metadata.shared,
        matrix=len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", ptx)),
        wide_loads=len(re.findall(r"ld\.global[\w.:]*\.v4\.b32|cp\.async\.cg", ptx)),
        loads=len(re.findall(r"ld\.global|cp\.async\.c[ag]", ptx)),
        warps=binary.metadata.num_warps,
    )


def table(
    target: str, names: Sequence[str] | None = None, form: str = "shipped"
) -> dict[str, Resources]:
    """Resources of every shipped launch for an arch (or of those whose case is named)."""
    from halogen_triton.shipped import shipped

    launches: dict[str, Launched] = {}
    for case, call in shipped(target):
        if names is None or any(case.startswith(name) for name in names):
            for launched in record(case, call):
                launches.setdefault(launched.name, launched)

    def one(item: tuple[str, Launched]) -> tuple[str, Resources]:
        return item[0], resources(compile_launch(item[1], target, form), target)

    with ThreadPoolExecutor(2) as threads:
        return dict(threads.map(one, launches.items()))


def rows(found: dict[str, Resources]) -> Iterator[tuple[str, dict[str, int]]]:
    """The table as plain data."""
    for name, value in found.items():
        yield name, attrs.asdict(value)


def check(target: str, names: Sequence[str] | None = None) -> bool:
    """Print a line for each form; whether no launch spills or needs scratch."""
    clean = True
    for form in FORMS if TARGETS[target][0] == "hip" else FORMS[:1]:
        found = table(target, names, form)
        bad = {name: row for name, row in found.items() if row.spills or row.scratch}
        print(f"Triton {triton.__version__}, {target}, {form}: {len(found)}, {len(bad)} spill")
        for name, row in bad.items():
            print(f"  {name}: {row.spills} spills, {row.scratch} bytes of scratch")
        clean = clean and not bad
    return clean


def main() -> None:
    """Print the table of one arch, or what spills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("cases", nargs="*", help="prefixes of case names; none: all")
    parser.add_argument("--form", choices=FORMS, default="shipped", help="sizes of tensors")
    parser.add_argument("--check", action="store_true", help="every form; what spills, in words")
    options = parser.parse_args()
    if options.check:
        sys.exit(0 if check(options.target, options.cases or None) else 1)
    found = table(options.target, options.cases or None, options.form)
    json.dump(dict(rows(found)), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
