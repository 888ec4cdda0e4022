"""The tutorial's backend and the skeleton of `halogen new-backend` are real: built, installed, certified."""

import json
import re
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest

from halogen_core.cli.new_backend import write_skeleton
from halogen_core.errors import ConfigError

ROOT = Path(__file__).parents[3]
TUTORIAL = ROOT / "docs/tutorials/write-a-backend.md"
MOST_LINES = 100
CLAIMED = re.compile(r"<!-- lines -->(\d+)<!-- /lines -->")


def tutorial_files():
    """Path -> text of every block that begins with a file name."""
    blocks = re.findall(r"```\w+\n# (\S+\.\w+)\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
    return dict(blocks)


def build_wheel(source, into):
    """A wheel of a plugin, without the network."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", into, source], check=True, capture_output=True, text=True)
    return next(into.glob("halogen_*.whl"))


def test_the_tutorials_backend_has_the_lines_it_says():
    lines = sum(text.count("\n") for text in tutorial_files().values())
    assert lines <= MOST_LINES
    assert int(CLAIMED.search(TUTORIAL.read_text()).group(1)) == lines


@pytest.mark.slow
def test_the_tutorials_backend_is_certified_to_level_3(new_site, tmp_path):
    source = tmp_path / "halogen-lumen"
    for name, text in tutorial_files().items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    (source / "halogen_lumen/__init__.py").write_text("")
    zipfile.ZipFile(build_wheel(source, tmp_path)).extractall(new_site.folder)
    began = time.monotonic()
    out = tmp_path / "report"
    done = new_site.conform("--backend", "lumen", "--threads", "1", "--level", 3, "--out", out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    report = json.loads((out / "report.json").read_text())
    native = {p["op"] for p in report["opened"][0]["placement"] if p["level"] == "native"}
    assert native == {"rms_norm", "linear", "gated_act"}
    print(f"certified to level 3 in {time.monotonic() - began:.0f} s")


@pytest.mark.slow
def test_a_skeleton_passes_and_everything_falls_back(new_site, tmp_path):
    source = write_skeleton("acme_npu", tmp_path)
    zipfile.ZipFile(build_wheel(source, tmp_path)).extractall(new_site.folder)
    out = tmp_path / "report"
    only = ("--only", "L0/*", "--only", "L1/*@f32", "--only", "L2/placement/*")
    arguments = ("--backend", "acme_npu", "--threads", 1, "--level", 2, "--out", out)
    done = new_site.conform(*arguments, *only)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    report = json.loads((out / "report.json").read_text())
    assert {p["level"] for p in report["opened"][0]["placement"]} == {"fallback"}
    assert report["level_certified"] == 0
    assert report["counts"]["L0"]["PASS"] == len(
        [r for r in report["results"] if r["id"].startswith("L0")]
    )


@pytest.mark.slow
def test_a_wheel_in_a_fresh_environment_is_found_probed_and_certified(tmp_path):
    """As a vendor does it: core, suite and plugin as wheels, in an environment of their own."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    plugin = write_skeleton("thirdparty", tmp_path)
    for source in (ROOT, ROOT / "tests/conformance", plugin):
        build_wheel(source, wheels)
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "env")
    python = tmp_path / "env/bin/python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    for wheel in wheels.glob("*.whl"):
        target = ["--target", site, "--no-deps", "--no-compile", "-q", wheel]
        subprocess.run([sys.executable, "-m", "pip", "install", *target], check=True)
    # third-party dependencies come from here; our own editable installs stay invisible
    dependencies = [p for p in sys.path if p.endswith("site-packages")]
    environment = {"PYTHONPATH": ":".join(dependencies), "PATH": "/usr/bin:/bin"}

    def run(*arguments):
        command = [python, "-c", "from halogen_core.cli.main import main; main()", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )

    where = [python, "-c", "import halogen_core; print(halogen_core.__file__)"]
    found = subprocess.run(
        where, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    assert found.stdout.startswith(str(tmp_path)), found.stdout
    listed = run("plugins", "list", "--json")
    assert '"thirdparty"' in listed.stdout, listed.stdout + listed.stderr
    out = tmp_path / "report"
    done = run("conform", "--backend", "thirdparty", "--level", "0", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((out / "report.json").read_text())["level_certified"] == 0


@pytest.mark.parametrize("name", ["Acme", "9lives", "a-b", "../x", ""])
def test_names_that_cannot_be_packages_are_refused(tmp_path, name):
    with pytest.raises(ConfigError) as caught:
        write_skeleton(name, tmp_path)
    assert caught.value.code == "HRT-6007"


def test_an_existing_folder_is_left_alone(tmp_path):
    write_skeleton("acme", tmp_path)
    with pytest.raises(ConfigError) as caught:
        write_skeleton("acme", tmp_path)
    assert caught.value.code == "HRT-6008"
