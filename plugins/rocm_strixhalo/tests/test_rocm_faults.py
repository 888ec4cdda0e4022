"""Errors of the ROCm stack: what they mean, told wherever the host meets them."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from halogen_core.spi import (
    Activation,
    BackendOptions,
    DeviceError,
    HalogenError,
    KVSpec,
    WeightRole,
)
from halogen_rocm.backend import RocmBackend, create
from halogen_rocm.explaining import asked_bytes, explained
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
    text = "No CUDA GPUs are available"
    monkeypatch.setattr("halogen_rocm.backend.RocmBackend", failing(RuntimeError(text)))
    with pytest.raises(DeviceError, match="may not open /dev/kfd"):
        create(BackendOptions())


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
