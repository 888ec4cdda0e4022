"""Doctor rules for NVIDIA machines on fixture trees, and what `create_ahead` takes."""

import pytest

from halogen_core.spi import BackendOptions, ConfigError, DoctorContext, Severity
from halogen_cuda.doctor import findings

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Release Build\n"


def judge(root, files, torch=""):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    context = DoctorContext(root=str(root), commands={"pip show torch": torch}, live=False)
    return {f.code: f for f in findings(context)}


def test_no_nvidia_no_word(tmp_path):
    amd = {"sys/bus/pci/devices/0/vendor": "0x1002\n", "sys/bus/pci/devices/0/class": "0x030000\n"}
    assert judge(tmp_path, amd) == {}


def test_a_gpu_without_driver_is_named(tmp_path):
    bus = {"sys/bus/pci/devices/0/vendor": "0x10de\n", "sys/bus/pci/devices/0/class": "0x030200\n"}
    found = judge(tmp_path, bus)["cuda.driver"]
    assert found.severity is Severity.ERROR
    assert "not loaded" in found.text
    assert "--gpus all" in found.fix


@pytest.mark.parametrize(
    ("driver", "severity"), [("580.159.04", Severity.OK), ("535.183.01", Severity.WARNING)]
)
def test_drivers(tmp_path, driver, severity):
    files = {"dev/nvidia0": "", "proc/driver/nvidia/version": VERSION.format(driver)}
    found = judge(tmp_path, files, "2.11.0+cu130")
    assert found["cuda.driver"].severity is severity
    assert "cuda.torch" not in found


@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.13.0+rocm7.0"])
def test_wrong_wheels(tmp_path, torch):
    found = judge(tmp_path, {"dev/nvidia0": ""}, torch)["cuda.torch"]
    assert found.severity is Severity.ERROR
    assert "index-url" in found.fix


def test_archs_to_compile_ahead_for():
    from halogen_cuda.backend import create_ahead

    with pytest.raises(ConfigError, match="cuda:sm_90"):
        create_ahead(BackendOptions(device="cuda:hopper"))
