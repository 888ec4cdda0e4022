"""`halogen selftest`: passes where arithmetic is right, fails where a fault is put in."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from halogen_core.cli.main import main
from halogen_core.cli.selftest import ahead_candidate
from halogen_core.cli.selftest_checks import run_checks
from halogen_core.cli.selftest_record import keep_record, record_findings
from halogen_core.errors import BackendUnavailable
from halogen_core.plugins import PluginRegistry
from halogen_core.spi import BackendOptions, TorchBackend, TorchOps


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def verdicts(ops):
    backend = type("Faulty", (TorchBackend,), {"ops_class": ops, "torch_is_native": True})
    opened = backend(BackendOptions(extra={"dtype": "f32"}), name="faulty")
    return {outcome.name: outcome.verdict for outcome in run_checks(opened)}


class WrongRows(TorchOps):
    """A kernel that is right for one row only."""

    def linear(self, x, weight, *, bias=None):
        y = super().linear(x, weight, bias=bias)
        y[1:] *= 1.2
        return y


class OtherSequence(TorchOps):
    """Attention that reads its neighbour's cache."""

    def attention(self, q, kv, layer, meta, spec, *, sinks=None):
        meta.block_tables[:] = meta.block_tables[-1]
        return super().attention(q, kv, layer, meta, spec, sinks=sinks)


class NotANumber(TorchOps):
    def rms_norm(self, x, weight, *, eps):
        return super().rms_norm(x, weight, eps=eps) * float("nan")


class Crash(TorchOps):
    def gated_act(self, gate_up, kind):
        raise RuntimeError("HIP error: invalid device function")


def test_right_arithmetic_passes():
    assert set(verdicts(TorchOps).values()) == {"ok"}


@pytest.mark.parametrize(
    ("fault", "caught", "spared"),
    [
        (WrongRows, "linear F16, 5 rows", "linear F16, 1 rows"),
        (OtherSequence, "llama: beside another stream", "llama: prompt in one step"),
        (NotANumber, "rms_norm", "embed"),
        (Crash, "gated_act silu", "logits"),
    ],
)
def test_faults_are_found_where_they_are(fault, caught, spared):
    found = verdicts(fault)
    assert found[caught] in ("wrong", "error")
    assert found[spared] == "ok"


def selftest(tmp_path, *arguments):
    flags = ("--backend", "cpu_reference", "--threads", "1", "--cache-dir", str(tmp_path))
    return CliRunner().invoke(main, ["selftest", *flags, *arguments])


def test_the_command_reports_as_data(tmp_path):
    done = selftest(tmp_path, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["passed"]
    assert report["versions"]["torch"] == torch.__version__
    assert np.max([check["error"] for check in report["checks"]]) < 0.01


def test_contradictions_are_refused(tmp_path):
    done = selftest(tmp_path, "--ahead", "--tune")
    assert done.exit_code == 2
    assert "HRT-1003" in done.output


def test_only_compilers_compile_ahead():
    registry = PluginRegistry.discover()
    assert ahead_candidate(registry, "rocm").spec.name == "rocm_strixhalo"
    with pytest.raises(BackendUnavailable, match="cpu_reference"):
        ahead_candidate(registry, "cpu_reference")


def test_a_change_since_the_last_selftest_is_told_by_doctor(tmp_path):
    assert selftest(tmp_path, "--json").exit_code == 0
    path = tmp_path / "selftest" / "cpu_reference.json"

    def told():
        done = CliRunner().invoke(main, ["doctor", "--json", "--cache-dir", str(tmp_path)])
        return [f["text"] for f in json.loads(done.output) if f["code"] == "core.selftest"]

    assert told() == []
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"torch": "1.0"}))
    assert "torch 1.0 → " in told()[0]
    path.write_text("{")
    assert "cannot be read" in told()[0]


def test_a_record_that_cannot_be_kept_is_no_failure(tmp_path, caplog):
    (tmp_path / "selftest").write_text("in the way")
    report = {"backend": "b", "device": "d", "versions": {"torch": "2"}, "passed": True}
    keep_record(tmp_path, report)
    assert "doctor will not know of this selftest" in caplog.text


def test_a_failed_selftest_forgets_the_passed_one(tmp_path):
    report = {"backend": "b", "device": "d", "versions": {"torch": "2"}, "passed": True}
    keep_record(tmp_path, report)
    assert list(record_findings(tmp_path, {"torch": "2"})) == []
    assert "torch 2 → 3" in next(record_findings(tmp_path, {"torch": "3"})).text
    keep_record(tmp_path, report | {"passed": False})
    assert list(record_findings(tmp_path, {"torch": "3"})) == []
