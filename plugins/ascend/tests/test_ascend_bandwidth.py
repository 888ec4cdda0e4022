"""HBM bandwidth against a stored baseline: simulated clock, and the copy path on the CPU."""

import json

import pytest
import torch
from ascend_steps import open_sim
from click.testing import CliRunner

from halogen_ascend.bandwidth_command import bandwidth_command
from halogen_ascend.calibration import compare, copied_bandwidth, simulated_bandwidth
from halogen_core.spi import ConfigError, Severity


def rate(**extra):
    backend = open_sim("910B2", **extra)
    try:
        return simulated_bandwidth(backend.device)
    finally:
        backend.close()


def test_the_simulated_rate_is_close_to_the_part_and_never_over_it():
    assert 0.9 * 1.6e12 < rate() <= 1.6e12
    assert rate() == rate()


def test_a_slow_core_is_seen(tmp_path):
    file = tmp_path / "deep" / "baseline.json"
    assert compare(file, "ascend:sim:910B2", rate()).severity is Severity.INFO
    assert compare(file, "ascend:sim:910B2", rate()).severity is Severity.OK
    told = compare(file, "ascend:sim:910B2", rate(faults="slow_core=0:2"))
    assert told.severity is Severity.WARNING
    assert (told.code, bool(told.fix)) == ("HRT-7118", True)


@pytest.mark.parametrize(("share", "severity"), [(0.9, Severity.OK), (0.899, Severity.WARNING)])
def test_ninety_percent_is_the_line_and_devices_are_apart(tmp_path, share, severity):
    file = tmp_path / "baseline.json"
    compare(file, "ascend:0", 1e12)
    compare(file, "ascend:1", 5e11)
    assert compare(file, "ascend:0", share * 1e12).severity is severity
    assert compare(file, "ascend:1", 5e11).severity is Severity.OK
    # a warning does not move the baseline; only asking does
    assert compare(file, "ascend:0", 1e12).severity is Severity.OK
    assert compare(file, "ascend:0", 8e11, reset=True).severity is Severity.INFO
    assert sorted(json.loads(file.read_text()).values()) == [5e11, 8e11]
    assert [p.name for p in tmp_path.iterdir()] == ["baseline.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 0}', '{"a": NaN}', '{"a": "fast"}', "\x00"])
def test_a_damaged_baseline_is_refused_and_kept(tmp_path, text):
    file = tmp_path / "baseline.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compare(file, "ascend:0", 1e12)
    assert caught.value.code == "HRT-7119"
    assert file.read_text() == text


def test_the_copy_is_timed_between_synchronizations():
    log, times = [], iter([0.0, 9.0, *(t for i in range(5) for t in (10.0 + i, 10.5 + i))])

    def clock():
        log.append("clock")
        return next(times)

    got = copied_bandwidth(
        torch.device("cpu"), lambda: log.append("sync"), nbytes=1 << 16, clock=clock
    )
    assert got == 2 * (1 << 16) / 0.5
    assert log == ["sync", "clock", "sync", "clock"] * 6


def test_the_command_stores_then_warns(tmp_path):
    arguments = ["--device", "ascend:sim:910B2", "--baseline", str(tmp_path / "b.json")]
    first = CliRunner().invoke(bandwidth_command, arguments)
    assert (first.exit_code, "stored" in first.output) == (0, True)
    slow = [*arguments, "--backend-option", "faults=slow_core=3:4"]
    second = CliRunner().invoke(bandwidth_command, slow)
    assert second.exit_code == 1, second.output
    assert "of the baseline" in second.output
