"""Doctor rules, probe reasons and error texts on fixture trees."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from halogen_core.cli.main import main
from halogen_core.spi import DoctorContext, Severity
from halogen_rocm.doctor import findings
from halogen_rocm.faults import FAULTS, explain
from halogen_rocm.platform import read_platform
from halogen_rocm.probe import hardware_reason, torch_reason

sys.path.insert(0, str(Path(__file__).parent))
from trees import CASES, tree, write


def judge(tmp_path, name, *, env=None, **more):
    root = tree(tmp_path, name, **more)
    context = DoctorContext(root=root, environment=env or {}, live=False)
    return {f.code: f for f in findings(context)}


def bad(found):
    return {code for code, f in found.items() if f.severity in (Severity.WARNING, Severity.ERROR)}


EXPECTED = {
    "A": set(),
    "B": {"rocm.memory.gtt"},
    "C": {"rocm.memory.carve_out", "rocm.memory.gtt"},
    "D": {"rocm.memory.carve_out", "rocm.memory.gtt"},
    "E": {"rocm.memory.carve_out"},
    "F": {"rocm.memory.carve_out"},
    "G": {"rocm.cmdline.gtt", "rocm.memory.gtt"},
    "H": {"rocm.memory.leak"},
    "I": {"rocm.cmdline.module"},
    "J": set(),
}


@pytest.mark.parametrize("name", CASES)
def test_each_machine_gets_its_findings_and_no_others(tmp_path, name):
    found = judge(tmp_path, name)
    assert bad(found) == EXPECTED[name]
    assert all(f.fix for f in found.values() if f.severity is not Severity.OK)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("A", "one memory: a host tier for KV is part of the KV pool and copies nothing"),
        ("B", "copies nothing; 50.2 GiB more are the host's alone, by copies"),
        ("C", "a host tier for KV is memory apart: up to 21.0 GiB, by copies"),
    ],
)
def test_what_a_host_tier_would_be_is_told(tmp_path, name, said):
    assert judge(tmp_path, name)["rocm.memory.host_tier"].text.endswith(said)


def test_the_lost_digit_is_named_with_arithmetic(tmp_path):
    found = judge(tmp_path, "G")["rocm.cmdline.gtt"]
    assert "12.0 GiB" in found.text
    assert "120.0 GiB" in found.text
    assert "31457280" in found.fix


@pytest.mark.parametrize(
    ("name", "more", "limits"),
    [
        ("B", {}, {f"ttm.pages_limit={116 * 262144}"}),
        # the carve-out comes back to the host: 31 + 95.5 - 6
        ("C", {}, {f"ttm.pages_limit={120 * 262144}"}),
        ("D", {}, {f"ttm.pages_limit={119 * 262144}"}),
        ("E", {}, set()),
        ("G", {}, {f"ttm.pages_limit={120 * 262144}"}),
        # here gttsize has lost a digit
        ("G", {"cmdline": "amdgpu.gttsize=12288 ttm.pages_limit=31457280"},
         {f"ttm.pages_limit={120 * 262144}"}),
        # neither can be: more than there is
        ("G", {"cmdline": "amdgpu.gttsize=12288 ttm.pages_limit=314572800"},
         {f"ttm.pages_limit={116 * 262144}"}),
        ("B", {"module": "amdttm"}, {f"amdttm.pages_limit={116 * 262144}"}),
    ],
)  # fmt: skip
def test_all_rules_advise_one_limit_that_can_be(tmp_path, name, more, limits):
    found = judge(tmp_path, name, **more)
    told = {text for f in found.values() for text in re.findall(r"\w*ttm\.pages_limit=\d+", f.fix)}
    assert told == limits


@pytest.mark.parametrize(
    ("cmdline", "severity", "fix"),
    [
        (None, Severity.WARNING, "BIOS"),
        ("quiet", Severity.ERROR, "modprobe amdgpu"),
        ("quiet nomodeset", Severity.ERROR, "nomodeset: leave that out"),
    ],
)
def test_a_gpu_that_nobody_drives_is_told(tmp_path, cmdline, severity, fix):
    """The chip is there by its CPU's name, or on the bus; amdgpu is not."""
    root = tree(tmp_path, "A", cmdline=cmdline or "")
    shutil.rmtree(tmp_path / "sys/class")
    if cmdline is not None:
        bus = "sys/bus/pci/devices/0000:c5:00.0"
        write(tmp_path, {f"{bus}/vendor": "0x1002\n", f"{bus}/device": "0x1586\n"})
    found = {f.code: f for f in findings(DoctorContext(root=root, live=False))}
    hidden = found["rocm.gpu.hidden"]
    assert hidden.severity is severity
    assert fix in hidden.fix
    assert hardware_reason(read_platform(root)).text == hidden.text
    assert "cpu_ggml" not in hidden.fix


def test_nothing_of_this_machine_counts_in_a_copied_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "11.0.1")
    root = tree(tmp_path, "A")

    def told():
        shown = CliRunner().invoke(main, ["doctor", "--json", "--root", root])
        return {f["code"]: f for f in json.loads(shown.output)}

    found = told()
    assert not {"rocm.override", "core.torch", "core.python", "rocm.groups"} & found.keys()
    write(
        tmp_path,
        {
            "environ": "PATH=/usr/bin\nHSA_OVERRIDE_GFX_VERSION=11.5.1\n",
            "commands/id -Gn": "me video\n",
            "commands/rocminfo": "Agent 2\n  Name:                    gfx1151\n",
            "commands/pip show torch": "2.13.0+cpu\n",
        },
    )
    found = told()
    assert found["rocm.override"]["severity"] == "warning"
    assert "not in render" in found["rocm.groups"]["text"]
    assert found["rocm.rocminfo"]["severity"] == "ok"
    assert "is cpu" in found["rocm.torch"]["text"]


@pytest.mark.parametrize("refused", ["kfd", "renderD128", None])
def test_who_may_open_the_nodes_needs_no_group(tmp_path, monkeypatch, refused):
    """Desktops give the seat's user an ACL; groups say nothing then."""
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != refused)
    context = DoctorContext(
        root=tree(tmp_path, "A"), commands={"id -Gn": "me wheel"}, environment={}, live=True
    )
    found = {f.code: f for f in findings(context)}["rocm.groups"]
    assert found.severity is (Severity.OK if refused is None else Severity.ERROR)


def test_rocminfo_is_asked_on_a_live_machine(tmp_path, monkeypatch):
    tool = tmp_path / "bin/rocminfo"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\necho 'Unable to open /dev/kfd read-write: Permission denied'\nexit 1"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    context = DoctorContext(root=tree(tmp_path / "root", "A"), live=True)
    found = {f.code: f for f in findings(context)}["rocm.rocminfo"]
    assert found.severity is Severity.ERROR
    assert "no GPU" in found.text


@pytest.mark.parametrize(
    ("more", "code", "severity"),
    [
        ({"kernel": "6.8.0-45-generic"}, "rocm.kernel", Severity.ERROR),
        ({"kernel": "6.17.3"}, "rocm.kernel", Severity.WARNING),
        ({"kernel": "6.17.3", "cmdline": "amdgpu.cwsr_enable=0"}, "rocm.kernel", Severity.OK),
        ({"kernel": "7.0.0"}, "rocm.kernel", Severity.WARNING),
        ({"env": {"HSA_OVERRIDE_GFX_VERSION": "11.0.1"}}, "rocm.override", Severity.ERROR),
        ({"env": {"HSA_OVERRIDE_GFX_VERSION": "11.5.1"}}, "rocm.override", Severity.WARNING),
        ({"cmdline": "amd_iommu=pt"}, "rocm.cmdline.iommu", Severity.WARNING),
        ({"cmdline": "quiet"}, "rocm.cmdline.iommu", Severity.INFO),
        ({"cmdline": "amdgpu.gttsize=122880 amd_iommu=off"}, "rocm.cmdline.gtt", Severity.INFO),
        ({"sclk": "0: 600Mhz\n1: 900Mhz *\n"}, "rocm.clocks", Severity.WARNING),
        ({"level": "low"}, "rocm.clocks.level", Severity.WARNING),
        ({"temp": "98000"}, "rocm.thermal", Severity.WARNING),
        ({"mes": "83"}, "rocm.firmware", Severity.ERROR),
        ({"mes": "80"}, "rocm.firmware", Severity.OK),
    ],
)  # fmt: skip
def test_rules(tmp_path, more, code, severity):
    assert judge(tmp_path, "A", **more)[code].severity is severity


def test_a_gpu_in_use_has_leaked_nothing(tmp_path):
    assert "rocm.memory.leak" not in judge(tmp_path, "H", kfd_proc=["77"])


def test_missing_nodes_are_named(tmp_path):
    root = Path(tree(tmp_path, "A"))
    (root / "dev/kfd").unlink()
    context = DoctorContext(root=str(root), live=False)
    found = {f.code: f for f in findings(context)}["rocm.nodes"]
    assert found.severity is Severity.ERROR
    assert "/dev/kfd" in found.text
    assert "/dev/kfd" in hardware_reason(read_platform(str(root))).text


def test_machines_without_amd_gpus_hear_nothing(tmp_path):
    assert list(findings(DoctorContext(root=str(tmp_path), live=False))) == []


def test_no_rule_touches_thermal_protection(tmp_path):
    texts = [
        f.fix
        for i, n in enumerate(CASES)
        for f in judge(tmp_path / str(i), n, temp="99000").values()
    ]
    assert not any("thermal" in text and "off" in text for text in texts)


def test_other_chips_are_refused_by_name(tmp_path):
    reason = hardware_reason(read_platform(tree(tmp_path, "J")))
    assert "gfx1100" in reason.text
    assert "fewer registers" not in reason.hint
    hx = "AMD Ryzen AI 9 HX 370 w/ Radeon 890M"
    other = tree(tmp_path / "other", "A", device=0x150E, gfx=110500, cpu=hx)
    assert "fewer registers" in hardware_reason(read_platform(other)).hint
    assert hardware_reason(read_platform(tree(tmp_path / "a", "A"))) is None


@pytest.mark.parametrize(
    ("build", "archs", "available", "code"),
    [
        ((None, "13.0"), [], False, "wrong_torch"),
        ((None, None), [], False, "wrong_torch"),
        (("7.14", None), ["gfx1100", "gfx942"], True, "torch_arch"),
        (("7.14", None), ["gfx1151"], False, "hip_unavailable"),
        (("7.14", None), ["gfx1151"], True, None),
        (("7.14", None), ["gfx1100", "gfx1151", "gfx1201"], True, None),
    ],
)
def test_torch_builds_are_told_apart(build, archs, available, code):
    reason = torch_reason(build, archs, available=available)
    assert (reason and reason.code) == code


def test_error_texts_are_explained():
    assert explain("RuntimeError: No CUDA GPUs are available").meaning.startswith("torch was not")
    assert explain("HIP error: invalid device function").fix
    assert explain("Memory access fault by GPU node-1 ... Page not present or supervisor")
    assert explain("something else") is None
    assert all(fault.meaning and fault.fix for fault in FAULTS)
