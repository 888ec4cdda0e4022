"""Loads in the loops of gfx1151 machine code, by the pointer they read through.

`python compiled_loads.py FORM,... CASE ...` prints JSON; for forms see `compile_gate.FORMS`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import halogen_triton
from halogen_triton.compile_gate import compile_launch, record, resources
from halogen_triton.shipped import shipped

KERNELS = Path(halogen_triton.__file__).parent
STREAMS = ("codes", "data")
"""Pointers to what a kernel's loop is about: codes of weights, the KV cache."""
_LOAD = re.compile(r"\s+(?:global|buffer)_load_(\w+)")
_LOC = re.compile(r"\s+\.loc\s.*; (\w+\.py):(\d+):")


@cache
def pointers(file: str) -> dict[int, str]:
    """Line of each `tl.load` in a file -> the parameter that its address starts with."""
    found: dict[int, str] = {}
    if not (KERNELS / file).exists():
        # functions of Triton's own
        return found
    for function in ast.walk(ast.parse((KERNELS / file).read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        roots = {argument.arg: argument.arg for argument in function.args.args}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                roots.setdefault(node.targets[0].id, roots.get(_leftmost(node.value), "?"))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
                found[node.lineno] = roots.get(_leftmost(node.args[0]), "?")
    return found


def _leftmost(node: ast.expr) -> str:
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Call | ast.Attribute):
            node = node.func if isinstance(node, ast.Call) else node.value
        else:
            return "?"
    return node.id


def width(mnemonic: str) -> int:
    """Bytes of one lane: b128 -> 16, d16_hi_u8 -> 1."""
    bits = re.search(r"(\d+)$", mnemonic)
    assert bits, mnemonic
    return int(bits.group(1)) // 8


def loops(lines: list[str]) -> dict[int, int]:
    """First line -> last line; a loop with several ways back is one."""
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".LBB")}
    found: dict[int, int] = {}
    for i, line in enumerate(lines):
        jump = re.match(r"\s+s_c?branch\w* (\.LBB\w+)", line)
        if jump and labels[jump.group(1)] <= i:
            found[labels[jump.group(1)]] = i
    return found


def loop_of(asm: str) -> dict[str, object]:
    """What the smallest loop with a load of a stream does, per lane and round."""
    lines, where, loads = asm.splitlines(), "?", {}
    for i, line in enumerate(lines):
        if loc := _LOC.match(line):
            where = pointers(loc.group(1)).get(int(loc.group(2)), "?")
        if load := _LOAD.match(line):
            loads[i] = where, width(load.group(1))
    with_stream = [
        (last - first, first, last)
        for first, last in loops(lines).items()
        if any(first <= i <= last and loads[i][0] in STREAMS for i in loads)
    ]
    if not with_stream:
        return {}
    _, first, last = min(with_stream)
    asked: dict[str, Counter[int]] = defaultdict(Counter)
    for i, (name, size) in loads.items():
        if first <= i <= last:
            asked[name][size] += size
    body = [line.strip() for line in lines[first : last + 1]]
    return {
        "bytes": asked,
        "barriers": sum(line.startswith("s_barrier") for line in body),
        "shared": sum(line.startswith("ds_") for line in body),
    }


def main() -> None:
    """Print {launch: {form: what was compiled}} of the cases named (none: all)."""
    found, forms, names = {}, sys.argv[1].split(","), tuple(sys.argv[2:])
    for case, call in shipped("gfx1151"):
        for launched in record(case, call) if not names or case.startswith(names) else ():
            binaries = {form: compile_launch(launched, "gfx1151", form) for form in forms}
            found[launched.name] = {
                form: {
                    "spills": r.spills,
                    "scratch": r.scratch,
                    "loop": loop_of(binary.asm["amdgcn"]),
                }
                for form, binary in binaries.items()
                if (r := resources(binary, "gfx1151"))
            }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
