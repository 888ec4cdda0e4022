"""The certificate of cpu_ggml in continuous integration: L0 to L3, and L4 but for faults and soak."""

import json
import subprocess
import sys

import pytest

HALOGEN = "from halogen_core.cli.main import main; main()"


def conform(out, level, *more):
    command = [sys.executable, "-c", HALOGEN, "conform", "--backend", "cpu_ggml"]
    command += ["--level", str(level), "--out", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    report = json.loads((out / "report.json").read_text())
    return done, report


@pytest.mark.slow
def test_ops_memory_and_models_are_certified_without_gaps(tmp_path):
    done, report = conform(tmp_path, 3)
    assert done.returncode == 0, done.stdout[-2000:]
    assert report["level_certified"] == 3
    assert report["declared_gaps"] == {}


@pytest.mark.slow
def test_a_real_server_answers_from_each_requests_own_tokens(tmp_path):
    done, report = conform(tmp_path, 4, "--only", "L4/serving/*")
    assert done.returncode == 0, done.stdout[-2000:]
    assert report["counts"]["L4"]["PASS"] >= 5
