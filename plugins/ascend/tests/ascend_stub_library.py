"""Making a torch_npu wheel importable without CANN: stub libraries from its undefined symbols.

Nothing of the vendor's is copied: the names of what the wheel lacks are read with `nm`, and each
becomes a C function that returns 0 (the device count: 1). Real allocation still fails; schemas, Meta kernels and fake
tensors work.
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

VERSION = "2.13.0"
_DATA = ("_ZTI", "_ZTV", "_ZTS")


def install(folder: Path) -> Path:
    """The unpacked wheel; raises with pip's own words when the registry does not have it."""
    site = folder / "site"
    run(
        sys.executable,
        *("-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"),
        *("--target", site, f"torch-npu=={VERSION}"),
    )
    return site


def make_stubs(site: Path, folder: Path) -> list[str]:
    """Compile stub libraries into `folder`; the names of the symbols that they define."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = [p for p in (site / "torch_npu").rglob("*.so*") if "inductor" not in str(p)]
    ours = [p for p in ours if p.parent.name in ("torch_npu", "lib")]
    wanted = set().union(*(_symbols(p, "--undefined-only") for p in ours))
    here = set().union(*(_symbols(p, "--defined-only") for p in [*ours, *_providers()]))
    lacking = sorted(s for s in wanted - here if re.fullmatch(r"(?!_?Py)[A-Za-z_]\w*", s))
    source = folder / "stubs.c"
    source.write_text("\n".join(_define(s) for s in lacking) + "\n")
    missing = sorted(set().union(*(_needed(p) for p in ours)) - {p.name for p in ours} - _found())
    for number, library in enumerate(missing):
        code = [source] if number == 0 else []
        empty = folder / "empty.c"
        empty.write_text("")
        run("cc", "-shared", "-fPIC", "-w", "-o", folder / library, *(code or [empty]))
    return lacking


def run(*command: object) -> str:
    """Output of a command; raises with its error text."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} {command[1]} failed: {done.stderr[-2000:]}")
    return done.stdout


def _define(symbol: str) -> str:
    if symbol.startswith(_DATA):
        return f"char {symbol}[512] = {{0}};"
    if symbol == "aclrtGetDeviceCount":
        # one device, or a mere device guard ends the process
        return f"int {symbol}(unsigned *count) {{ *count = 1; return 0; }}"
    return f"long {symbol}() {{ return 0; }}"


def _symbols(path: Path, which: str) -> set[str]:
    lines = run("nm", "-D", which, path).splitlines()
    weak = (line.split()[-2:] for line in lines)
    return {name.partition("@")[0] for kind, name in weak if kind not in ("w", "v")}


def _needed(path: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", path)))


def _providers() -> list[Path]:
    libraries = list((Path(torch.__file__).parent / "lib").glob("*.so*"))
    system = run("ldd", Path(torch._C.__file__))
    return [*libraries, *(Path(p) for p in re.findall(r"=> (/\S+)", system))]


def _found() -> set[str]:
    known = {p.name for p in _providers()} | {"ld-linux-x86-64.so.2"}
    cached = run("/sbin/ldconfig", "-p")
    return (
        known
        | set(re.findall(r"^\s*(\S+) \(", cached, re.M))
        | {sysconfig.get_config_var("LDLIBRARY") or ""}
    )
