"""Which kernels are built, chosen and refused, on this machine and for another."""

import importlib
import platform
import shutil
import subprocess
from pathlib import Path

import emulation
import pytest

from halogen_core.spi import BackendOptions, BackendUnavailable, ConfigError, PluginError
from halogen_cpu_ggml import native
from halogen_cpu_ggml.backend import create

FOREIGN = next(
    isas[-1] for m, isas in native.ISAS.items() if isas[-1] not in native.isas(platform.machine())
)


@pytest.fixture
def build(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    return importlib.import_module("hatch_build")


def test_the_package_and_its_build_know_the_same_instruction_sets(build):
    assert {m: tuple(isas) for m, isas in build.ISAS.items()} == {
        m: native.isas(m) for m in native.ISAS
    }
    assert native.isas("riscv64") == ("scalar",)


def test_another_machines_kernels_are_refused_with_those_of_this_one():
    with pytest.raises(ConfigError, match="it takes auto, .*scalar, off") as caught:
        create(BackendOptions(threads=1, extra={"kernels": FOREIGN}))
    assert caught.value.code == "HRT-3603"
    assert FOREIGN not in str(caught.value).partition("it takes")[2]


def test_kernels_that_were_not_built_are_refused_not_replaced(monkeypatch):
    monkeypatch.setattr(native, "_library", lambda: None)
    with pytest.raises(BackendUnavailable, match="auto, off are possible") as caught:
        create(BackendOptions(threads=1, extra={"kernels": "scalar"}))
    assert caught.value.code == "HRT-3614"
    create(BackendOptions(threads=1, extra={"kernels": "auto"})).close()


@pytest.fixture
def library(monkeypatch, tmp_path):
    """Where the kernels are looked for in this test."""
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "kernels.so")
    native._library.cache_clear()
    yield tmp_path / "kernels.so"
    native._library.cache_clear()


def test_kernels_compile_without_a_warning(build, tmp_path):
    """Here, not where a user builds: another compiler may warn of more."""
    assert "-Wall" in build.FLAGS
    assert "-Werror" not in build.FLAGS
    build.compile_all(["gcc", "-Werror", "-fsyntax-only"], tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        build.compile_all(["gcc", "-Werror", "-fsyntax-only", "-Wunused-parameter"], tmp_path)


def test_without_a_compiler_nothing_is_built(build, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert build.build(tmp_path / "kernels.so") is None
    assert not list(tmp_path.iterdir())
    assert "no-such-compiler" in capsys.readouterr().err


@pytest.mark.skipif(
    shutil.which(emulation.COMPILER) is None or platform.machine() != "x86_64",
    reason=f"{emulation.COMPILER} is not here, or this machine is not x86-64",
)
def test_a_cross_compiler_decides_what_is_built(build, monkeypatch, library):
    """And a library that came to the wrong machine is named, not a crash."""
    monkeypatch.setenv("CC", f"{emulation.COMPILER} -O0")
    assert build.target(build.compiler()) == "aarch64"
    assert build.wheel_platform("aarch64") == "linux_aarch64"
    assert build.wheel_platform("x86_64") == "linux_x86_64"
    monkeypatch.setattr(build, "PER_ISA", ())
    monkeypatch.setattr(build, "ONCE", ("pack.c",))
    assert build.build(library) == "aarch64"
    with pytest.raises(PluginError, match="another machine") as caught:
        native.kernels("auto")
    assert caught.value.code == "HRT-3611"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_a_library_of_an_older_version_is_named(library, tmp_path):
    """After an update the old one may lack a function that is called now."""
    source = tmp_path / "old.c"
    source.write_text("void *hx_kernels(char *isa) { return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(PluginError, match="hx_struct_size.*another version") as caught:
        native.kernels("auto")
    assert caught.value.code == "HRT-3611"
    assert "reinstall" in caught.value.fix
