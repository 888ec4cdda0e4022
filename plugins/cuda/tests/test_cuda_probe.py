"""Reasons of the probe and the backend where there is no GPU; a fake torch stands for machines."""

import types

import pytest
import torch

from halogen_core.errors import BackendUnavailable, ConfigError
from halogen_core.spi import BackendOptions, ProbeContext
from halogen_cuda.backend import CudaBackend, device_index
from halogen_cuda.probe import devices, driver_reason, nvidia_node, wrong_build


@pytest.mark.parametrize(
    ("cuda", "hip", "code"),
    [(None, None, "cpu_torch"), (None, "7.1", "rocm_torch"), ("13.0", None, None)],
)
def test_builds_are_told_apart(cuda, hip, code):
    reason = wrong_build(cuda, hip, has_gpu=True)
    assert (reason and reason.code) == code
    assert reason is None or reason.hint


def test_missing_device_node_and_old_driver_are_different_reasons(tmp_path):
    assert driver_reason(str(tmp_path), "13.0").code == "no_device"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").write_text("")
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module  470.1\n")
    reason = driver_reason(str(tmp_path), "13.0")
    assert nvidia_node(str(tmp_path))
    assert reason.code == "driver"
    assert "470.1" in reason.text


def fake_torch(*cards):
    properties = [
        types.SimpleNamespace(name=name, major=major, minor=0, total_memory=1 << 34)
        for name, major in cards
    ]
    cuda = types.SimpleNamespace(
        device_count=lambda: len(properties), get_device_properties=properties.__getitem__
    )
    return types.SimpleNamespace(cuda=cuda, version=types.SimpleNamespace(cuda="13.0"))


def test_old_gpus_are_named_and_new_ones_found():
    found = devices(fake_torch(("Tesla V100", 7), ("H200", 9)), ProbeContext())
    assert [d.id for d in found.devices] == ["cuda:1"]
    assert found.devices[0].arch == "sm_90"
    refused = devices(fake_torch(("Tesla V100", 7)), ProbeContext())
    assert refused.score == 0
    assert "Tesla V100 has compute capability 7.0" in refused.reasons[0].text


def test_devices_by_number():
    assert (device_index(None), device_index("cuda"), device_index("cuda:3")) == (0, 0, 3)
    with pytest.raises(ConfigError, match="cuda:N"):
        device_index("cuda:x")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about a machine without a GPU")
def test_no_gpu_is_a_reason_not_a_crash():
    with pytest.raises(BackendUnavailable, match="torch sees 0 CUDA devices"):
        CudaBackend(BackendOptions())
