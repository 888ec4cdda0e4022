"""Each row of the doctor's table: what is read, and what is said; locking, sensors, throttling."""

import errno
import logging
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch

from halogen_core.cli.bench import gauges
from halogen_core.engine.building import assemble_engine
from halogen_core.engine.options import EngineOptions
from halogen_core.models import config_of
from halogen_core.spi import (
    BackendOptions,
    ConfigError,
    DoctorContext,
    KVSpec,
    QuantTensor,
    Severity,
    WeightRole,
)
from halogen_core.spi.testing import tiny_checkpoint
from halogen_rocm import locking
from halogen_rocm.backend import RocmBackend
from halogen_rocm.doctor import findings
from halogen_rocm.faults import FAULTS
from halogen_rocm.memory import hip_shortfall
from halogen_rocm.platform import read_platform
from halogen_rocm.sensors import Sensors, read_sensors, throttle_suspected

sys.path.insert(0, str(Path(__file__).parent))
from trees import tree, write

DEVICE = "sys/class/drm/card1/device"
DPKG = "Package: linux-firmware\nStatus: install ok installed\nVersion: {}\n\n"
LIMITS = "Limit                     Soft Limit           Hard Limit           Units\nMax locked memory         {}              {}              bytes\n"

ERROR, WARNING, INFO, OK = Severity.ERROR, Severity.WARNING, Severity.INFO, Severity.OK


def judge(tmp_path, *, files=None, env=None, commands=None, **more):
    root = tree(tmp_path, "A", **more)
    write(Path(root), files or {})
    context = DoctorContext(
        root=root, environment=env or {}, commands=commands or {}, live=False
    )  # fmt: skip
    return {f.code: f for f in findings(context)}


ROWS = [
    ("rocm.gpu", OK, {}, "gfx1151"),
    ("rocm.gpu", ERROR, {"gfx": 110000}, "says gfx1100 of a chip that is gfx1151"),
    ("rocm.gpu", INFO, {"simds": 64}, "32 compute units"),
    ("rocm.gpu", INFO, {"device": 0x150E, "gfx": 110500}, "fewer registers"),
    ("rocm.groups", ERROR, {"commands": {"id -Gn": "me video"}}, "not in render"),
    ("rocm.groups", WARNING, {"commands": {"id -Gn": "me render"}}, "not in video"),
    ("rocm.groups", OK, {"commands": {"id -Gn": "me render video"}}, "render and video"),
    ("rocm.torch", ERROR, {"commands": {"pip show torch": "2.13.0+cu130"}}, "CPU or CUDA wheel"),
    ("rocm.torch", ERROR, {"commands": {"pip show torch": "2.13.0"}}, "CPU or CUDA wheel"),
    ("rocm.torch", OK, {"commands": {"pip show torch": "2.13.0+rocm7.14"}}, "ROCm build"),
    ("rocm.rocminfo", OK, {"commands": {"rocminfo": "Agent 2\n  Name:    gfx1151\n"}}, "gfx1151"),
    ("rocm.rocminfo", ERROR, {"commands": {"rocminfo": "Agent 1\n  Name: CPU\n"}}, "no GPU"),
    ("rocm.version", WARNING, {"files": {"opt/rocm/.info/version": "6.4.3-1"}}, "6.4"),
    ("rocm.version", OK, {"files": {"opt/rocm/.info/version": "7.2.3"}}, "7.2"),
    ("rocm.switches.hipblaslt", WARNING, {"env": {"ROCBLAS_USE_HIPBLASLT": "0"}}, "slower"),
    ("rocm.switches.hidden", ERROR, {"env": {"HIP_VISIBLE_DEVICES": ""}}, "hides"),
    ("rocm.firmware.package", ERROR,
     {"files": {"var/lib/dpkg/status": DPKG.format("20251125-1")}}, "broken"),
    ("rocm.firmware.dkms", WARNING,
     {"files": {"var/lib/dpkg/status": "Package: amdgpu-dkms-firmware\n"}}, "replaces"),
    ("rocm.cmdline.harmful", INFO, {"cmdline": "amd_iommu=off amdgpu.noretry=0"}, "noretry"),
    ("rocm.clocks.profile", WARNING,
     {"files": {"sys/firmware/acpi/platform_profile": "quiet\n"}}, "quiet"),
    ("rocm.clocks.epp", WARNING,
     {"files": {"sys/devices/system/cpu/cpu0/cpufreq/energy_performance_preference": "power\n"}},
     "power"),
    ("rocm.clocks.tuned", INFO, {"files": {"etc/tuned/active_profile": "balanced\n"}}, "balanced"),
    ("rocm.clocks.fabric", OK, {"files": {f"{DEVICE}/pp_dpm_fclk": "0: 600Mhz *\n1: 2000Mhz\n"}},
     "600 of at most 2000 MHz"),
    ("rocm.clocks.fabric", WARNING,
     {"files": {f"{DEVICE}/pp_dpm_fclk": "0: 600Mhz *\n1: 2000Mhz\n", f"{DEVICE}/gpu_busy_percent": "99"}},
     "decoding goes by memory"),
    ("rocm.thermal", OK, {"files": {f"{DEVICE}/gpu_busy_percent": "99"}}, "61 °C, 99 % busy"),
    ("rocm.hang", WARNING,
     {"files": {f"{DEVICE}/gpu_busy_percent": "100", f"{DEVICE}/hwmon/hwmon3/power1_average": "50000000"}},
     "100 % busy at 50 W"),
    ("rocm.memory.fragmented", WARNING,
     {"files": {"proc/buddyinfo": "Node 0, zone   Normal 9 9 9 9 9 9 9 9 9 5 1\n"}}, "2 MiB pages"),
    ("rocm.memlock", INFO, {"files": {"proc/self/limits": LIMITS.format(8388608, 8388608)}},
     "8388608 bytes"),
    ("rocm.memlock.engine", OK,
     {"files": {"proc/77/cmdline": "python\0-m\0halogen_core.engine.worker\0" + "3",
                "proc/77/status": "VmRSS: 4194304 kB\nVmLck: 2097152 kB\n"}},
     "2.00 GiB locked (VmLck) of 4.00 GiB"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "severity", "more", "words"), ROWS)
def test_row(tmp_path, code, severity, more, words):
    found = judge(tmp_path, **more)[code]
    assert found.severity is severity
    assert words in found.text
    assert severity is OK or found.fix


def test_a_good_machine_has_only_good_rows(tmp_path):
    files = {
        "var/lib/dpkg/status": DPKG.format("20260110-1"),
        "sys/firmware/acpi/platform_profile": "performance\n",
        "etc/tuned/active_profile": "accelerator-performance\n",
        "proc/buddyinfo": "Node 0, zone   Normal 9 9 9 9 9 9 9 9 9 5 30000\n",
        "proc/self/limits": LIMITS.format("unlimited", "unlimited"),
        f"{DEVICE}/gpu_busy_percent": "100",
        f"{DEVICE}/hwmon/hwmon3/power1_average": "85000000",
    }
    commands = {"id -Gn": "me render video", "pip show torch": "2.13.0+rocm7.14"}
    found = judge(tmp_path, files=files, commands=commands)
    assert {f.severity for f in found.values()} == {OK}


def test_every_text_of_the_error_table_is_known():
    texts = {fault.text for fault in FAULTS}
    assert len(texts) == 11
    for fault in FAULTS:
        assert not re.search(r"thermal.*off", fault.fix)


# -- locking


def layout_of(backend):
    return backend.kv_layout(KVSpec(num_layers=1, num_kv_heads=2, head_dim=64, block_size=16))


def opened(tmp_path, **extra):
    options = BackendOptions(extra=extra)
    return RocmBackend(options, root=tree(tmp_path, "A"), device="cpu")


def test_the_working_set_is_locked_where_that_is_allowed(tmp_path):
    backend = opened(tmp_path)
    cache = backend.kv_alloc(layout_of(backend), 30)
    norm = QuantTensor(format="F32", shape=(8,), data=np.zeros(32, np.uint8))
    backend.pack([norm], WeightRole.NORM)
    size = sum(t.nbytes for t in cache.payload.tensors)
    assert backend.counters().gauges["working_set_bytes"] == size + 32
    if backend.working_set.reason is None:
        # not the growth: the allocator may hand out pages that an earlier test had locked
        assert locking.locked_bytes() >= size
    else:
        assert "RLIMIT_MEMLOCK" in backend.working_set.reason.text
    del cache


def refuse(monkeypatch):
    reason = locking.lock_reason(errno.EPERM, 1 << 40)
    calls = []

    def denied(address, size):
        calls.append(size)
        return locking.Locked(bytes=0, reason=reason)

    monkeypatch.setattr(locking, "lock", denied)
    return calls


def test_a_refusal_is_told_once_and_never_fatal(tmp_path, monkeypatch, caplog):
    calls = refuse(monkeypatch)
    backend = opened(tmp_path)
    for _ in range(2):
        backend.kv_alloc(layout_of(backend), 3)
    assert len(calls) == 1
    assert caplog.text.count("memory is not locked") == 1
    assert "LimitMEMLOCK=infinity" in caplog.text


def test_asked_for_it_is_an_error_with_arithmetic(tmp_path, monkeypatch):
    refuse(monkeypatch)
    backend = opened(tmp_path, mlock="on")
    with pytest.raises(ConfigError, match="1048576.0 MiB failed.*RLIMIT_MEMLOCK is") as caught:
        backend.kv_alloc(layout_of(backend), 3)
    assert caught.value.code == "HRT-3414"
    assert "LimitMEMLOCK" in caught.value.fix


def test_off_locks_nothing(tmp_path, monkeypatch):
    calls = refuse(monkeypatch)
    backend = opened(tmp_path, mlock="off")
    backend.kv_alloc(layout_of(backend), 3)
    assert calls == []
    with pytest.raises(ConfigError, match="auto, on, off"):
        opened(tmp_path / "other", mlock="maybe")


def test_arithmetic_of_the_limit(monkeypatch):
    monkeypatch.setattr(locking.resource, "getrlimit", lambda _: (8 << 20, 16 << 20))
    monkeypatch.setattr(locking, "locked_bytes", lambda: 4 << 20)
    monkeypatch.setattr(locking, "_above_limits", lambda: False)
    text = locking.lock_reason(12, 100 << 20).text
    assert "locking 100.0 MiB failed" in text
    assert "4.0 MiB are locked" in text
    assert "RLIMIT_MEMLOCK is 8.0 MiB, 96.0 MiB too little (hard limit 16.0 MiB)" in text


# -- memory that HIP does not see, stalls


@pytest.mark.parametrize(
    ("name", "hip_gib", "said"),
    [("A", 124, None), ("A", 15.5, "15.5 GiB of 124.0 GiB"), ("C", 95, None), ("C", 48, "of 96.0")],
)
def test_what_hip_does_not_see_is_told(tmp_path, name, hip_gib, said):
    gpu = read_platform(tree(tmp_path, name)).strix_halo
    told = hip_shortfall(gpu, int(hip_gib * 2**30))
    assert (told is None) == (said is None)
    assert said is None or said in told


def test_stalls_for_compaction_are_counted(tmp_path):
    root = tree(tmp_path, "A")
    backend = RocmBackend(BackendOptions(), root=root, device="cpu")
    assert backend.counters().counters["host_compaction_stalls"] == 0
    write(Path(root), {"proc/vmstat": "nr_free_pages 12\ncompact_stall 37\ncompact_fail 2\n"})
    assert backend.counters().counters["host_compaction_stalls"] == 37


@pytest.mark.parametrize("card", ["card0", "card1", "card128"])
def test_an_apus_card_may_have_any_number(tmp_path, card):
    root = Path(tree(tmp_path, "A"))
    (root / "sys/class/drm/card1").rename(root / "sys/class/drm" / card)
    assert read_platform(str(root)).strix_halo.card == card


# -- sensors


def test_sensors_become_gauges(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    root = tree(tmp_path, "A", sclk="0: 600Mhz\n1: 2900Mhz *\n")
    write(
        Path(root),
        {f"{DEVICE}/gpu_busy_percent": "97", f"{DEVICE}/hwmon/hwmon3/power1_average": "85000000"},
    )
    now = read_sensors(read_platform(root).strix_halo)
    assert now == Sensors(celsius=61, watts=85, busy=97, megahertz=2900)
    backend = RocmBackend(BackendOptions(), root=root, device="cpu")
    gauges = backend.counters().gauges
    assert (gauges["gpu_watts"], gauges["gpu_busy_ratio"], gauges["gpu_clock_hertz"]) == (
        85,
        0.97,
        2.9e9,
    )
    assert gauges["throttle_suspected"] == 0
    # the clock falls while it stays busy: then, and only then, heat is suspected
    write(
        Path(root),
        {
            f"{DEVICE}/pp_dpm_sclk": "0: 600Mhz\n1: 1400Mhz *\n",
            f"{DEVICE}/hwmon/hwmon3/power1_average": "45000000",
        },
    )
    assert backend.counters().gauges["throttle_suspected"] == 1
    write(Path(root), {f"{DEVICE}/gpu_busy_percent": "3"})
    assert backend.counters().gauges["throttle_suspected"] == 0


def test_a_bench_report_holds_clock_and_heat(tmp_path):
    root = tree(tmp_path, "A", sclk="0: 600Mhz\n1: 2900Mhz *\n")
    checkpoint = tiny_checkpoint("llama")
    options = EngineOptions(model_path="", model_id="tiny", end_token_ids=[], kv_bytes=8 << 20)
    backend = RocmBackend(BackendOptions(), root=root, device="cpu")
    engine = assemble_engine(options, backend, checkpoint, config_of(checkpoint))
    found = gauges(engine)
    engine.close()
    assert (found["gpu_clock_hertz"], found["gpu_celsius"]) == (2.9e9, 61)


def test_missing_sensors_suspect_nothing():
    assert not throttle_suspected(Sensors(), Sensors())
    assert Sensors().shown == ""


def test_torch_is_not_needed_to_judge_a_tree():
    import subprocess

    code = "import sys, halogen_rocm.doctor; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch is not None
