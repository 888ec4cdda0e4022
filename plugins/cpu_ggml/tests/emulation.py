"""Kernels of another machine under an emulator, in a backend whose Python runs here.

The kernels are cross-compiled into a small program (`emulated.c`) that works on this process's
memory. So every test of our kernels covers them as it does those of this machine. Of speed this
says nothing.
"""

import ctypes as C
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from functools import lru_cache
from pathlib import Path

import pytest

from halogen_core.spi import BackendOptions
from halogen_cpu_ggml import native
from halogen_cpu_ggml.backend import create
from halogen_cpu_ggml.kernel_mode import KernelMode
from halogen_cpu_ggml.kernel_ops import KernelOps

ROOT = Path(__file__).parents[1]
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PROGRAM, TILE_SIZE, PACK = range(3)
CALLBACK = C.CFUNCTYPE(None, C.c_void_p, C.c_int, C.c_int, C.c_void_p)


def modes():
    """NEON's instruction sets for parametrised tests; none where they run without an emulator."""
    names = [isa for isa in native.ISAS["aarch64"] if isa not in native.isas(platform.machine())]
    missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    reason = f"NEON kernels are tested under an emulator; not found: {', '.join(missing)}"
    skip = [pytest.mark.skipif(bool(missing), reason=reason)]
    return [pytest.param(isa, marks=skip) for isa in names]


def backend(isa, threads):
    """`cpu_ggml` with the emulator's kernels in the place of this machine's."""
    made = create(BackendOptions(threads=threads, extra={"kernels": "off"}))
    emulator = Emulator(isa)
    made.team.crew = EmulatedCrew(emulator, threads)
    made.mode = KernelMode(KernelOps(made.recorder, EmulatedKernels(emulator)))
    made.mode.lock_with(made.locks.hold)
    return made


def cache_directory(name):
    """Where tests keep what takes long to make or fetch."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "halogen" / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@lru_cache(maxsize=1)
def program():
    """The kernels and `emulated.c`, compiled and linked for the emulator; kept for later runs."""
    sys.path.insert(0, str(ROOT))
    from hatch_build import FLAGS, compile_all

    source = Path(__file__).with_name("emulated.c")
    read = [*sorted((ROOT / "csrc").iterdir()), ROOT / "hatch_build.py", source]
    version = hashlib.sha256(b"".join(p.read_bytes() for p in read)).hexdigest()
    output = cache_directory("test-kernels") / version[:16]
    if not output.exists():
        with tempfile.TemporaryDirectory(dir=output.parent) as folder:
            objects = compile_all([COMPILER, "-Werror"], Path(folder))
            made = Path(folder) / "emulated"
            command = [COMPILER, *FLAGS, "-static", "-pthread", source, *objects, "-lm", "-o", made]
            subprocess.run(command, check=True)
            made.replace(output)
    return output


class Emulator:
    """The program under the emulator, at work for this process."""

    def __init__(self, isa):
        self.isa, self.lock = isa, threading.Lock()
        memory = os.open("/proc/self/mem", os.O_RDWR)
        self.process = subprocess.Popen(
            [EMULATOR, program(), isa, str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[memory],
        )
        os.close(memory)
        self.panel = self._answer()

    def ask(self, *words):
        """What the program answers to up to 8 integers."""
        with self.lock:
            self.process.stdin.write(struct.pack("8q", *words, *[0] * (8 - len(words))))
            self.process.stdin.flush()
            return self._answer()

    def _answer(self):
        said = self.process.stdout.read(8)
        if len(said) < 8:
            raise RuntimeError(f"the {self.isa} kernels died: status {self.process.wait()}")
        return struct.unpack("q", said)[0]

    def stop(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class EmulatedKernels(native.Kernels):
    """The table holds places of kernels, which the program looks up in its own."""

    def __init__(self, emulator):
        table = native.Table(isa=emulator.isa.encode(), panel=emulator.panel)
        for place, (name, _) in enumerate(native.Table._fields_[2:], 1):
            setattr(table, name, place)
        super().__init__(emulator, table)

    def tile_bytes(self, fmt, k):
        return self.library.ask(TILE_SIZE, native.FORMATS[fmt], k)

    def pack_tiles(self, fmt, raw, shape, out, span):
        self.library.ask(PACK, native.FORMATS[fmt], raw, *shape, out, span.start, span.stop)


class EmulatedCrew(native.Crew):
    """A program of kernels goes to the emulator as a whole."""

    def __init__(self, emulator, threads):
        self.threads, self.callback = threads, CALLBACK(self._run)
        super().__init__(emulator, 0, None)

    @property
    def entry(self):
        return C.cast(self.callback, C.c_void_p).value

    def _run(self, node, ith, nth, address):
        if ith == 0:
            given = native.Program.from_address(address)
            self.library.ask(PROGRAM, given.ops, given.n, self.threads)

    def stop(self):
        self.library.stop()
