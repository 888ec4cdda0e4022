"""A run that was cut goes on with the same backend and the same code, or not at all."""

import importlib
import json
from pathlib import Path

import attrs
import pytest

from halogen_conformance.case import Result, Status
from halogen_conformance.journal import FILE, Journal
from halogen_conformance.runner import Told
from halogen_conformance.sources import changed, sources
from halogen_conformance.target import PluginFacts, Target
from halogen_core.errors import ConfigError

FOUND = Result(id="L1/add/T1-H100@f32", status=Status.PASS)
PLUGIN = PluginFacts(
    name="acme", module="acme_npu.plugin", distribution="acme-npu", version="1.0", status="ok"
)
TARGET = Target(backend="acme", plugin="acme")


class Installed:
    """Distributions `acme-npu` (a package) and `acme-kernels`, which it requires, to be edited."""

    def __init__(self, folder: Path):
        self.site, self.project = folder / "site", folder / "kernels project"
        self.write(self.site / "acme_npu/plugin.py", "one")
        self.write(self.site / "acme_npu/__init__.py", "")
        self.write(self.project / "src/acme_kernels/__init__.py", "one")
        self.distribution("acme-npu", Requires="acme_kernels >=1 ; python_version > '3'")
        self.distribution("acme-kernels", Requires="no-such-thing; extra == 'test'")
        where = {"url": self.project.as_uri(), "dir_info": {"editable": True}}
        self.write(self.info("acme-kernels") / "direct_url.json", json.dumps(where))

    def info(self, name: str) -> Path:
        return self.site / f"{name.replace('-', '_')}-1.0.dist-info"

    def distribution(self, name: str, *, Requires: str) -> None:
        lines = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {Requires}\n"
        self.write(self.info(name) / "METADATA", lines)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    made = Installed(tmp_path)
    monkeypatch.syspath_prepend(made.site)
    importlib.invalidate_caches()
    return made


@pytest.fixture
def cut(installed, tmp_path):
    """The folder of a run that was cut after one result."""
    journal = Journal(tmp_path / "out", resume=False)
    journal.begin(TARGET, PLUGIN, Told())
    journal.add(FOUND, Told())
    return tmp_path / "out"


def resume(folder, target=TARGET, plugin=PLUGIN):
    return Journal(folder, resume=True).begin(target, plugin, Told())


def test_what_was_found_is_kept_while_the_code_is_the_same(cut):
    assert resume(cut) == resume(cut) == {FOUND.id: FOUND}


def test_nothing_is_kept_without_being_asked(cut):
    assert Journal(cut, resume=False).begin(TARGET, PLUGIN, Told()) == {}


@pytest.mark.parametrize(
    "other",
    [
        {"target": attrs.evolve(TARGET, device="acme:1")},
        {"target": attrs.evolve(TARGET, options={"dtype": "bf16"})},
        {"plugin": attrs.evolve(PLUGIN, version="1.1")},
    ],
    ids=["device", "option", "version"],
)
def test_another_run_is_refused(cut, other):
    with pytest.raises(ConfigError) as caught:
        resume(cut, **other)
    assert caught.value.code == "HRT-6009"


EDITS = {
    "plugin": ("site/acme_npu/plugin.py", "package acme_npu.plugin"),
    "new file of the plugin": ("site/acme_npu/more.py", "package acme_npu.plugin"),
    "what it requires": ("kernels project/src/acme_kernels/__init__.py", "acme-kernels"),
    "a module in no package": ("kernels project/src/single.py", "acme-kernels"),
    "built file": ("kernels project/src/acme_kernels/lib.so", "acme-kernels"),
    "what an installer wrote": ("site/acme_npu-1.0.dist-info/RECORD", "acme-npu"),
}


@pytest.mark.parametrize(("file", "name"), EDITS.values(), ids=EDITS)
def test_changed_code_is_refused_by_name(installed, cut, tmp_path, file, name):
    journal = (cut / FILE).read_text()
    installed.write(tmp_path / file, "another")
    with pytest.raises(ConfigError) as caught:
        resume(cut)
    assert caught.value.code == "HRT-6010"
    assert caught.value.message.endswith(f"other code of {name}")
    assert "leave out --resume" in caught.value.fix
    assert (cut / FILE).read_text() == journal, "the journal of the other code is left as it is"


def test_what_runs_leave_behind_is_no_change(installed, cut, tmp_path):
    installed.write(tmp_path / "site/acme_npu/__pycache__/plugin.cpython-311.pyc", "x")
    installed.write(tmp_path / "kernels project/notes.md", "x")
    assert resume(cut) == {FOUND.id: FOUND}


def test_suite_core_and_what_they_require_are_part_of_the_code(installed):
    code = sources(PLUGIN)
    assert {"halogen-conformance", "halogen-core", "numpy", "torch", "python"} <= code.keys()
    assert changed(code, {**code, "halogen-core": "another"}) == ["halogen-core"]
    assert changed(code, {k: v for k, v in code.items() if k != "torch"}) == ["torch"]
