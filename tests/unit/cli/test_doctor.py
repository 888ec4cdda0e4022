"""The doctor's own checks, on trees of files that stand for machines."""

import json

import pytest
from click.testing import CliRunner

from halogen_core.cli.doctor_checks import core_findings, worst
from halogen_core.cli.main import main
from halogen_core.spi import DoctorContext, Finding, Severity

MEMINFO = "MemTotal: 33554432 kB\nMemAvailable: 25165824 kB\nHugePages_Total: 0\n"


@pytest.fixture
def machine(tmp_path):
    def build(**files):
        for path, text in ({"proc/meminfo": MEMINFO} | files).items():
            target = tmp_path / path.replace("__", "/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        found = core_findings(DoctorContext(root=str(tmp_path), live=False))
        return {f.code: f for f in found}

    return build


def test_a_healthy_machine(machine):
    found = machine(**{"proc/swaps": "Filename Type Size Used Priority\n"})
    assert found["core.memory"].severity is Severity.OK
    assert "24.0 GiB of 32.0 GiB" in found["core.memory"].text
    assert found["core.swap"].text == "swap is off"
    assert "core.governor" not in found
    assert worst(found.values()) is Severity.OK


def test_the_control_group_counts_when_it_is_tighter(machine):
    found = machine(
        **{
            "proc/self/cgroup": "0::/halogen\n",
            "sys/fs/cgroup/halogen/memory.max": "max\n",
            "sys/fs/cgroup/memory.max": f"{6 << 30}\n",
            "sys/fs/cgroup/memory.current": f"{2 << 30}\n",
        }
    )
    memory = found["core.memory"]
    assert memory.severity is Severity.INFO
    assert "allows 6.0 GiB, 2.0 GiB used" in memory.text
    assert memory.evidence == f"{4 << 30} bytes usable"


def test_swap_and_governor_are_warned_of_with_a_fix(machine):
    found = machine(
        **{
            "proc/swaps": "Filename Type\n/dev/zram0 partition 1 0 100\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n",
        }
    )
    assert "/dev/zram0" in found["core.swap"].text
    assert "swapoff" in found["core.swap"].fix
    assert "performance, powersave" in found["core.governor"].text
    assert worst(found.values()) is Severity.WARNING


def test_an_empty_tree_is_said_not_guessed(tmp_path):
    found = {f.code: f for f in core_findings(DoctorContext(root=str(tmp_path), live=False))}
    assert found["core.memory"].severity is Severity.WARNING


def test_the_command_prints_findings_and_data(tmp_path):
    result = CliRunner().invoke(main, ["doctor", "--root", str(tmp_path)])
    assert "memory size is not readable" in result.output
    result = CliRunner().invoke(main, ["doctor", "--root", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "does not exist" in result.output
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert {"core.python", "core.torch", "core.memory"} <= {
        f["code"] for f in json.loads(result.output)
    }


def test_the_gravest_finding_decides():
    def finding(severity):
        return Finding(code="x", severity=severity, text="x")

    assert worst([]) is Severity.OK
    assert worst([finding(Severity.ERROR), finding(Severity.OK)]) is Severity.ERROR
