"""Errors of the ROCm stack: what they mean, told wherever the host meets them."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from halogen_core.spi import (
    Activation,
    BackendOptions,
    BackendUnavailable,
    DeviceError,
    HalogenError,
    KVSpec,
    WeightRole,
)
from halogen_rocm.backend import RocmBackend, create
from halogen_rocm.explaining import asked_bytes, explained
from halogen_rocm.probe import hip_reason
from halogen_triton.backend import TritonBackend

sys.path.insert(0, str(Path(__file__).parent))
from trees import tree

INVALID = RuntimeError("HIP error: invalid device function")
FULL = torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")


def failing(error):
    def fail(*args, **named):
        raise error

    return fail


@pytest.mark.parametrize("when", ["upload_step", "download", "synchronize", "kv_alloc", "pack",
                                  "capture", "fetch"])  # fmt: skip
def test_faults_are_told_where_the_host_meets_them(tmp_path, monkeypatch, when):
    """A kernel's fault surfaces at the next wait; ours says what it means and what to do."""
    backend = RocmBackend(BackendOptions(), root=tree(tmp_path, "A"), device="cpu")
    monkeypatch.setattr(TritonBackend, when, failing(INVALID))
    with pytest.raises(DeviceError, match="holds no code for gfx1151") as caught:
        getattr(backend, when)(*ARGUMENTS[when](backend))
    assert caught.value.code == "HRT-7001"
    assert caught.value.fix


@pytest.mark.parametrize(("error", "code"), [(INVALID, "HRT-7001"), (FULL, "HRT-3202")])
def test_faults_of_a_step_are_told(tmp_path, monkeypatch, error, code):
    """Launched eagerly, launched as a graph, or met while its tokens are waited for."""
    backend = RocmBackend(BackendOptions(), root=tree(tmp_path, "A"), device="cpu")
    launched = failing(error)
    monkeypatch.setattr(TritonBackend, "capture", lambda *_: launched)
    monkeypatch.setattr(TritonBackend, "fetch", lambda *_: launched)
    monkeypatch.setattr(backend._ops, "gated_act", launched)
    for call in (
        lambda: backend.capture(None, None)(None),
        backend.fetch(None),
        lambda: backend.ops.gated_act(torch.zeros(1, 8), Activation.SILU),
    ):
        with pytest.raises(HalogenError) as caught:
            call()
        assert caught.value.code == code
        assert error is INVALID or caught.value.asked == 5 << 29
        assert error is INVALID or "MemAvailable - reserve" in caught.value.fix


def test_a_gpu_that_vanished_since_the_probe_is_told(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(BackendUnavailable, match="a Strix Halo needs a ROCm build"):
        create(BackendOptions())
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "init", failing(RuntimeError("No CUDA GPUs are available")))
    with pytest.raises(DeviceError, match="may not open /dev/kfd"):
        create(BackendOptions())


@pytest.fixture
def hip(monkeypatch):
    """HIP as torch shows it, with devices of these archs; returns what was made current."""

    def devices(*archs):
        current = []
        monkeypatch.setattr(torch.version, "hip", "7.2")
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(archs))
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda i: SimpleNamespace(gcnArchName=archs[i])
        )
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr("halogen_rocm.backend.RocmBackend", lambda options, device: device)
        return current

    return devices


def test_a_discrete_gpu_beside_it_is_not_taken_for_it(hip):
    current = hip("gfx1100", "gfx1151:sramecc-:xnack-")
    assert create(BackendOptions()) == "cuda:1"
    assert current == [1]


@pytest.mark.parametrize("archs", [["gfx1100"], ["gfx1101", "gfx1201"]])
def test_other_gpus_alone_are_refused_by_name(hip, archs):
    """As they look with an override, too."""
    hip(*archs)
    with pytest.raises(BackendUnavailable, match=archs[0]) as caught:
        create(BackendOptions())
    assert "HSA_OVERRIDE_GFX_VERSION" in caught.value.fix
    assert hip_reason(archs).code == "hip_arch"
    assert hip_reason([*archs, "gfx1151"]) is None


def _layout(backend):
    return backend.kv_layout(KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, block_size=16))


ARGUMENTS = {
    "upload_step": lambda backend: [None],
    "download": lambda backend: [torch.zeros(1)],
    "synchronize": lambda backend: [],
    "kv_alloc": lambda backend: [_layout(backend), 3],
    "pack": lambda backend: [[], WeightRole.NORM],
    "capture": lambda backend: [None, None],
    "fetch": lambda backend: [None],
}


def test_unknown_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="shapes differ"), explained():
        raise RuntimeError("shapes differ")


@pytest.mark.parametrize(
    ("text", "size"), [("Tried to allocate 20.00 MiB.", 20 << 20), ("no figure", 0)]
)
def test_what_was_asked_is_read_from_torchs_text(text, size):
    assert asked_bytes(text) == size
