"""Both sides of every number that a rule goes by."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from halogen_core.spi import BackendOptions, DoctorContext, KVSpec, Severity
from halogen_rocm.backend import RocmBackend
from halogen_rocm.doctor import findings
from halogen_rocm.memory import hip_shortfall
from halogen_rocm.platform import read_platform
from halogen_rocm.sensors import Sensors, throttle_suspected

sys.path.insert(0, str(Path(__file__).parent))
from trees import CASES, tree, write

GIB = 1 << 30
DEVICE = "sys/class/drm/card1/device"
RAM = CASES["A"]["mem_kb"] * 1024
AVAILABLE = RAM - 4 * GIB
ERROR, WARNING, OK = Severity.ERROR, Severity.WARNING, Severity.OK
BUDDIES = "Node 0, zone   Normal 9 9 9 9 9 9 9 9 {} 0 {}\n"


def judged(tmp_path, *, files=None, **more):
    root = tree(tmp_path, "A", **more)
    write(tmp_path, files or {})
    context = DoctorContext(root=root, commands=more.get("commands", {}), live=False)
    return {f.code: f.severity for f in findings(context)}


def buddies(share, small=0):
    """Free pages of 4 MiB for a share of the memory that is available, and `small` of 1 MiB."""
    return {"files": {"proc/buddyinfo": BUDDIES.format(small, int(share * AVAILABLE) >> 22)}}


def working(busy, watts):
    return {
        "files": {
            f"{DEVICE}/gpu_busy_percent": str(busy),
            f"{DEVICE}/hwmon/hwmon3/power1_average": str(watts * 1_000_000),
        }
    }


def fabric(busy):
    levels = "0: 600Mhz *\n1: 2000Mhz\n"
    return {"files": {f"{DEVICE}/pp_dpm_fclk": levels, f"{DEVICE}/gpu_busy_percent": str(busy)}}


@pytest.mark.parametrize(
    ("code", "severity", "more"),
    [
        ("rocm.kernel", ERROR, {"kernel": "6.16.8"}),
        ("rocm.kernel", WARNING, {"kernel": "6.16.9"}),
        ("rocm.kernel", WARNING, {"kernel": "6.18.3-generic"}),
        ("rocm.kernel", OK, {"kernel": "6.18.4-generic"}),
        ("rocm.kernel", WARNING, {"kernel": "7.0.9"}),
        ("rocm.kernel", OK, {"kernel": "7.1.0"}),
        ("rocm.firmware", ERROR, {"mes": "0183"}),
        ("rocm.firmware", OK, {"mes": "82"}),
        ("rocm.memory.carve_out", WARNING, {"vram": 2 * GIB + 1}),
        ("rocm.memory.carve_out", None, {"vram": 2 * GIB}),
        ("rocm.memory.leak", ERROR, {"gtt_used": 8 * GIB + 1, "kfd_proc": []}),
        ("rocm.memory.leak", None, {"gtt_used": 8 * GIB, "kfd_proc": []}),
        ("rocm.memory.gtt", WARNING, {"gtt": int(0.74 * RAM)}),
        ("rocm.memory.gtt", None, {"gtt": int(0.76 * RAM)}),
        ("rocm.memory.fragmented", WARNING, buddies(0.09)),
        ("rocm.memory.fragmented", None, buddies(0.11)),
        ("rocm.memory.fragmented", WARNING, buddies(0.09, small=100_000)),
        ("rocm.thermal", OK, {"temp": "94900"}),
        ("rocm.thermal", WARNING, {"temp": "95000"}),
        ("rocm.clocks", WARNING, {"sclk": "0: 600Mhz *\n1: 2899Mhz\n"}),
        ("rocm.clocks", None, {"sclk": "0: 600Mhz *\n1: 2900Mhz\n"}),
        ("rocm.clocks.level", None, {"level": "high"}),
        ("rocm.clocks.level", WARNING, {"level": "manual"}),
        ("rocm.clocks.fabric", OK, fabric(94)),
        ("rocm.clocks.fabric", WARNING, fabric(95)),
        ("rocm.hang", WARNING, working(99, 59)),
        ("rocm.hang", None, working(99, 60)),
        ("rocm.hang", None, working(98, 59)),
        ("rocm.hang", None, working(99, 59) | {"kfd_proc": []}),
        ("rocm.version", WARNING, {"files": {"opt/rocm/.info/version": "6.9"}}),
        ("rocm.version", OK, {"files": {"opt/rocm/.info/version": "7.0"}}),
        ("rocm.groups", ERROR, {"commands": {"id -Gn": "me video"}}),
        ("rocm.groups", WARNING, {"commands": {"id -Gn": "me render"}}),
    ],
)
def test_each_side(tmp_path, code, severity, more):
    assert judged(tmp_path, **more).get(code) is severity


@pytest.mark.parametrize(
    ("busy", "watts", "megahertz", "suspected"),
    [
        ((100, 95), (85, 72), (2900, 2460), True),
        ((100, 94), (85, 72), (2900, 2460), False),
        ((94, 100), (85, 72), (2900, 2460), False),
        ((100, 100), (85, 73), (2900, 2460), False),
        ((100, 100), (85, 72), (2900, 2470), False),
    ],
)
def test_throttling_takes_a_fall_of_both_while_busy(busy, watts, megahertz, suspected):
    best, now = (
        Sensors(busy=b, watts=w, megahertz=m)
        for b, w, m in zip(busy, watts, megahertz, strict=True)
    )
    assert throttle_suspected(best, now) is suspected


def test_a_slow_fall_is_seen_against_the_best_reading(tmp_path):
    """Not against the one before, which had fallen too."""
    root = tree(tmp_path, "A")
    backend = RocmBackend(BackendOptions(extra={"mlock": "off"}), root=root, device="cpu")
    told = []
    for megahertz, watts in ((2900, 85), (2650, 77), (2440, 71)):
        sclk = f"0: 600Mhz\n1: {megahertz}Mhz *\n"
        write(tmp_path, {f"{DEVICE}/pp_dpm_sclk": sclk} | working(100, watts)["files"])
        told.append(backend.counters().gauges["throttle_suspected"])
    assert told == [0, 0, 1]


def test_a_closed_backend_holds_nothing(tmp_path):
    root = tree(tmp_path, "A")
    backend = RocmBackend(BackendOptions(extra={"mlock": "off"}), root=root, device="cpu")
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, block_size=16)
    backend.kv_alloc(backend.kv_layout(spec), 3)
    assert backend.counters().gauges["device_ledger_bytes"] > 0
    backend.close()
    assert backend.counters().gauges["device_ledger_bytes"] == 0


@pytest.mark.parametrize(("share", "told"), [(0.91, False), (0.89, True)])
def test_hip_may_miss_a_tenth(tmp_path, share, told):
    gpu = read_platform(tree(tmp_path, "A")).strix_halo
    assert (hip_shortfall(gpu, int(share * gpu.gtt_total)) is not None) is told
