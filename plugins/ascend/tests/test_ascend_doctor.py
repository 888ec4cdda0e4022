"""Doctor rules on captured text; no NPU, no driver."""

import subprocess
from pathlib import Path

import pytest

from halogen_ascend.captured import Captured
from halogen_ascend.doctor import checks
from halogen_ascend.doctor.machine import pair_finding, pcie_findings
from halogen_ascend.doctor.packages import impostors, owner, runtime
from halogen_ascend.import_errors import explain_import_error
from halogen_ascend.npu_smi import clocks, table, version
from halogen_core.spi import DoctorContext, Severity

FIXTURES = Path(__file__).parent / "fixtures"


def text(name):
    return (FIXTURES / name).read_text()


def run(tmp_path, **commands):
    context = DoctorContext(root=str(tmp_path), commands=commands, live=False)
    return {(f.code, f.severity) for f in checks(context)}, list(checks(context))


def put(root, path, content):
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(content)


def broken_torch_npu():
    return subprocess.CompletedProcess(
        [], 1, "", "ModuleNotFoundError: No module named 'torch_npu'"
    )


def test_who_has_no_npu_is_told_so_in_one_calm_line(tmp_path):
    source = Captured(DoctorContext(root=str(tmp_path), live=False))
    (calm,) = runtime(source, installed=False, run=broken_torch_npu)
    assert (calm.severity, calm.fix) == (Severity.OK, "")
    assert "ascend:sim" in calm.text
    put(tmp_path, "dev/davinci0", "")
    (told,) = runtime(source, installed=False, run=broken_torch_npu)
    assert told.severity is Severity.INFO
    assert "pip install torch-npu" in told.fix


def test_the_table_of_chips():
    chips = table(text("npu_smi_info.txt"))
    assert [(c.index, c.name, c.health, c.temperature) for c in chips] == [
        (0, "910B3", "OK", 47),
        (1, "910B3", "Alarm", 91),
    ]
    assert chips[0].bus == "0000:C1:00.0"
    assert (chips[1].hbm_used, chips[1].hbm_total) == (61203, 65536)
    assert version(text("npu_smi_info.txt")) == "23.0.1"


def test_a_hot_sick_throttled_chip_is_told(tmp_path):
    found, _ = run(
        tmp_path,
        **{
            "npu-smi info": text("npu_smi_info.txt"),
            "npu-smi info -t common -i 0": text("npu_smi_common_nominal.txt"),
            "npu-smi info -t common -i 1": text("npu_smi_common_throttled.txt"),
        },
    )
    assert ("HRT-7112", Severity.WARNING) in found
    assert ("HRT-7117", Severity.ERROR) in found
    assert ("HRT-7115", Severity.WARNING) in found
    assert ("HRT-7115", Severity.OK) in found


def test_throttling_is_inferred_from_the_ratio():
    assert clocks(text("npu_smi_common_throttled.txt")) == (800, 1800)
    assert clocks("nothing here") is None


@pytest.mark.parametrize(
    ("cann", "driver", "severity"),
    [
        ("6.3.RC3", "23.0.1", Severity.OK),
        ("6.3.RC2", "23.0.1", Severity.ERROR),
        ("8.0.RC1", "23.0.1", Severity.ERROR),
        ("8.0.0", "24.1.0", Severity.OK),
        ("9.9", "1", Severity.INFO),
    ],
)
def test_version_pairs(cann, driver, severity):
    assert pair_finding(cann, driver).severity is severity


def test_the_pair_is_read_from_files(tmp_path):
    put(tmp_path, "usr/local/Ascend/driver/version.info", "Version=23.0.1\nascendhal_version=7\n")
    found, _ = run(tmp_path)
    assert found == {("HRT-7111", Severity.WARNING)}
    cfg = "runtime_running_version=[7.0.0.5:6.3.RC2]\n"
    put(tmp_path, "usr/local/Ascend/ascend-toolkit/latest/version.cfg", cfg)
    found, findings = run(tmp_path)
    assert found == {("HRT-7111", Severity.ERROR)}
    assert "lose a core" in findings[0].text


def test_thermal_protection_off_is_an_error_and_nothing_is_changed(tmp_path):
    put(tmp_path, "etc/modprobe.d/npu.conf", "options ascend_aiserver thermal_policy=0\n")
    put(tmp_path, "sys/class/thermal/thermal_zone0/temp", "86500\n")
    before = sorted((str(p), p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    found, _ = run(tmp_path)
    assert found == {("HRT-7113", Severity.ERROR), ("HRT-7112", Severity.WARNING)}
    assert before == sorted((str(p), p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))


def test_pcie_width():
    wide, narrow = pcie_findings(text("lspci.txt"))
    assert wide.severity is Severity.OK
    assert narrow.severity is Severity.WARNING
    assert "x8 at 16 GT/s of x16" in narrow.text


def test_impostors_and_foreign_owners():
    assert [f.code for f in impostors({"flashx": "0.1", "numpy": "2"})] == ["HRT-7116"]
    assert list(owner(["halogen-ascend"])) == []
    assert [f.severity for f in owner(["halogen-ascend", "evil"])] == [Severity.ERROR]


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("ModuleNotFoundError: No module named 'torch_npu'", "not installed"),
        ("ImportError: libhccl.so: cannot open shared object file", "libhccl.so"),
        ("ImportError: libfoo.so.3: cannot open shared object file", "libfoo.so.3"),
        ("undefined symbol: __cxa_throw", "C++ runtime"),
        ("undefined symbol: aclrtFoo", "aclrtFoo"),
        ("version `GLIBC_2.38' not found", "GLIBC_2.38"),
        ("RuntimeError: Failed to load the backend extension: torch_npu", "import torch"),
        ("register_privateuse1_backend() has already been set", "one slot"),
        ("something else\nlast words", "last words"),
    ],
)
def test_import_errors_have_causes(message, cause):
    told = explain_import_error(message)
    assert cause in told.cause
    assert told.fix
