"""Plugins that hang, crash, print, lie: each is isolated and explained, and the suite finishes."""

import json

import pytest

MANIFEST = 'manifest = 1\nname = "{name}"\nspi = ">=1.0,<2"\n'
PLUGIN = """
from halogen_core.spi import BackendSpec, DeviceInfo, ProbeResult, hookimpl
{top}
@hookimpl
def halogen_backends():
    return [BackendSpec(name="{backend}", factory="{name}.backend:create")]

@hookimpl
def halogen_probe(name, context):
    if name != "{backend}":
        return None
    {probe}
    return ProbeResult(score=1, devices=(DeviceInfo(id="{backend}:0", name="x"),))
"""
BACKEND = """
import numpy as np
from halogen_core.spi import HostFallbackBackend, HostFallbackOps, TorchBackend
{top}
class Broken(TorchBackend):
    torch_is_native = True
    def __init__(self, options):
        super().__init__(options, name="{name}")
        {after}

def create(options):
    return Broken(options)
"""


def plugin(
    site,
    name,
    *,
    backend=None,
    top="",
    probe="pass",
    backend_top="",
    after="pass",
    manifest=MANIFEST,
):
    """A plugin package with one thing wrong."""
    files = {
        "__init__.py": "",
        "halogen-backend.toml": manifest.format(name=name),
        "plugin.py": PLUGIN.format(name=name, backend=backend or name, top=top, probe=probe),
        "backend.py": BACKEND.format(name=name, top=backend_top, after=after),
    }
    site.add(name, files, entry=name)


def certify(site, tmp_path, backend, *only, level=0, patience=1.0, **more):
    """Run the suite; its report and the finished process."""
    out = tmp_path / "report"
    arguments = ["--backend", backend, "--level", level, "--out", out, "--threads", 1]
    for pattern in only:
        arguments += ["--only", pattern]
    done = site.conform(*arguments, "--patience", patience, **more)
    assert (out / "report.json").exists(), done.stdout + done.stderr
    report = json.loads((out / "report.json").read_text())
    return report, {r["id"]: r for r in report["results"]}, done


def facts_of(report, name):
    return next(p for p in report["plugins"] if p["name"] == name)


def test_neighbours_that_hang_crash_print_and_lie_do_not_disturb_a_good_one(new_site, tmp_path):
    plugin(new_site, "bad_crash", top="import ctypes; ctypes.string_at(0)")
    plugin(new_site, "bad_exit", top="import os; os._exit(3)")
    plugin(new_site, "bad_import", top="import no_such_module")
    plugin(new_site, "bad_print", top='print("hello from import")')
    plugin(new_site, "bad_claim", backend="cpu_reference")
    newer = MANIFEST.replace(">=1.0,<2", ">=7.1,<8")
    plugin(new_site, "bad_newer", manifest=newer)
    report, _, done = certify(new_site, tmp_path, "cpu_reference", "L0/discovery/loads")
    assert done.returncode == 0, done.stdout + done.stderr
    assert facts_of(report, "bad_crash")["status"] == "crash"
    assert "signal 11" in facts_of(report, "bad_crash")["reason"]
    assert "exit code 3" in facts_of(report, "bad_exit")["reason"]
    assert facts_of(report, "bad_import")["status"] == "broken"
    assert "no_such_module" in facts_of(report, "bad_import")["reason"]
    assert "hello" in facts_of(report, "bad_print")["printed"]
    assert facts_of(report, "bad_newer")["status"] == "incompatible"
    assert ">=7.1" in facts_of(report, "bad_newer")["reason"]
    claimed = {n: facts_of(report, n) for n in ("bad_claim", "cpu_reference")}
    broken = [n for n, f in claimed.items() if f["status"] == "broken"]
    assert len(broken) == 1
    assert "claims backend name" in claimed[broken[0]]["reason"]


@pytest.mark.slow
def test_a_plugin_that_hangs_at_import_is_named_and_fails(new_site, tmp_path):
    plugin(new_site, "bad_hang", top="import time; time.sleep(1000)")
    only = ("L0/*", "L1/add/T1-H100@f32")
    report, results, done = certify(new_site, tmp_path, "bad_hang", *only, level=1, patience=0.15)
    assert done.returncode == 1
    assert facts_of(report, "bad_hang")["status"] == "hang"
    assert {r["status"] for r in results.values()} == {"FAIL"}
    assert "did not end within" in results["L0/discovery/loads"]["reason"]
    assert report["level_certified"] == -1


@pytest.mark.slow
def test_a_probe_that_segfaults_is_explained(new_site, tmp_path):
    plugin(new_site, "bad_probe", probe="import ctypes; ctypes.string_at(0)")
    only = ("L0/*", "L1/add/T1-H100@f32")
    _, results, _ = certify(new_site, tmp_path, "bad_probe", *only, level=1)
    assert results["L0/discovery/loads"]["status"] == "PASS"
    assert results["L0/probe/finds-a-device"]["status"] == "FAIL"
    assert "signal 11" in results["L0/probe/finds-a-device"]["reason"]
    opened = results["L1/add/T1-H100@f32"]
    assert opened["status"] == "FAIL"
    assert "cannot run here" in opened["reason"]


@pytest.mark.slow
def test_registration_that_prints_and_imports_torch_fails_l0(new_site, tmp_path):
    plugin(new_site, "bad_manners", top='import torch; print("welcome")')
    _, results, done = certify(new_site, tmp_path, "bad_manners", "L0/*")
    assert done.returncode == 1
    assert results["L0/discovery/nothing-heavy"]["status"] == "FAIL"
    assert "welcome" in results["L0/discovery/silent"]["reason"]
    assert results["L0/probe/finds-a-device"]["status"] == "PASS"


@pytest.mark.slow
def test_an_absent_device_is_a_failure_not_a_skip(new_site, tmp_path):
    absent = (
        "from halogen_core.spi import Reason; "
        'return ProbeResult(score=0, reasons=(Reason(code="none", text="no such card"),))'
    )
    plugin(new_site, "bad_absent", probe=absent)
    _, results, done = certify(new_site, tmp_path, "bad_absent", "L0/*", "L2/closing/*", level=2)
    assert done.returncode == 1
    assert "no such card" in results["L0/probe/finds-a-device"]["reason"]
    assert results["L2/closing/twice"]["status"] == "FAIL"
    assert "no such card" in results["L2/closing/twice"]["reason"]


@pytest.mark.slow
def test_imports_beside_the_spi_are_found(new_site, tmp_path):
    plugin(new_site, "bad_import_deep", backend_top="import halogen_core.engine.loop")
    _, results, _ = certify(new_site, tmp_path, "bad_import_deep", "L0/seam/*")
    assert "halogen_core.engine.loop" in results["L0/seam/imports-only-the-spi"]["reason"]


def test_ops_that_crash_hang_or_return_the_wrong_thing_end_only_their_own_cases(new_site, tmp_path):
    after = """
        ops = self._ops
        right_add, right_act = ops.add, ops.gated_act
        def add(x, y):
            import ctypes
            print("last words of add", flush=True)
            ctypes.string_at(0)
        def gated_act(x, kind):
            import time
            time.sleep(1000)
        ops.add, ops.gated_act = add, gated_act
        ops.select_rows = lambda x, meta: x[:1]
        right_embed = ops.embed
        ops.embed = lambda ids, table, scale=1.0: right_embed(ids, table, scale=scale).double()
        self.download = lambda array: np.array(array)
"""
    # workers ask this before a case's time begins, however long torch takes on a busy machine
    early = """
@hookimpl
def halogen_conformance():
    import torch
    return []
"""
    plugin(new_site, "bad_ops", top=early, after=after)
    cases = {
        "L1/add/T1-H100@f32": "CRASH",
        "L1/gated_act/silu-T1-F100@f32": "TIMEOUT",
        "L1/select_rows/some@f32": "FAIL",
        "L1/embed/F32-T1-H64@f32": "FAIL",
        "L1/linear/bias@f32": "PASS",
    }
    _, results, done = certify(new_site, tmp_path, "bad_ops", *cases, level=1, patience=0.15)
    assert done.returncode == 1
    assert {i: r["status"] for i, r in results.items()} == cases
    crash = results["L1/add/T1-H100@f32"]
    assert "signal 11" in crash["reason"]
    assert "last words of add" in crash["output"]
    assert "float64" in results["L1/embed/F32-T1-H64@f32"]["reason"]
    assert "shape" in results["L1/select_rows/some@f32"]["reason"]


@pytest.mark.slow
def test_a_backend_that_always_crashes_is_given_up_and_counted(new_site, tmp_path):
    plugin(new_site, "bad_always", after="import os; os.abort()")
    report, results, _ = certify(
        new_site, tmp_path, "bad_always", "L1/add/*", "L1/select_rows/*", level=1
    )
    statuses = [r["status"] for r in results.values()]
    assert statuses.count("CRASH") == 5
    assert statuses.count("NOT_RUN") == len(statuses) - 5 > 5
    assert report["counts"]["L1"]["NOT_RUN"] == statuses.count("NOT_RUN")


@pytest.mark.slow
def test_trouble_at_closing_is_told(new_site, tmp_path):
    after = "self.close = lambda: 1 / 0"
    plugin(new_site, "bad_close", after=after)
    report, results, _ = certify(new_site, tmp_path, "bad_close", "L1/add/T1-H100@f32", level=1)
    assert results["L1/add/T1-H100@f32"]["status"] == "PASS"
    assert any("ZeroDivisionError" in t for t in report["troubles"])


@pytest.mark.parametrize("name", ["nothing_like_it"])
def test_a_backend_that_is_not_installed_is_an_error_with_the_names(new_site, tmp_path, name):
    done = new_site.conform("--backend", name, "--level", 0)
    assert done.returncode == 2
    assert "HRT-6001" in done.stderr
    assert "cpu_reference" in done.stderr
