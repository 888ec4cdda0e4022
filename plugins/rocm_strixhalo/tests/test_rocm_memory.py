"""Memory rules on the fixture trees, reads past the page cache, locking."""

import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from halogen_core.spi import DoctorContext
from halogen_rocm import direct_read
from halogen_rocm.direct_read import file_span, read_span
from halogen_rocm.doctor import findings
from halogen_rocm.locking import lock, lock_reason, locked_bytes
from halogen_rocm.memory import GIB, RESERVE, Ledger, device_tier
from halogen_rocm.platform import read_platform

sys.path.insert(0, str(Path(__file__).parent))
from trees import CASES, tree, write


def tier(tmp_path, name, *, ledger=0, hip_free=None, **more):
    platform = read_platform(tree(tmp_path, name, **more))
    return device_tier(
        platform, platform.gpus[0], ledger=Ledger(device_bytes=ledger), hip_free=hip_free
    )


@pytest.mark.parametrize("name", CASES)
def test_carve_out_and_gtt_are_never_added(tmp_path, name):
    found = tier(tmp_path, name)
    case = CASES[name]
    assert found.total <= max(case["vram"], case["gtt"])
    assert 0 <= found.free <= found.total


@pytest.mark.parametrize(("name", "shared"), [("A", True), ("B", True), ("C", False), ("D", False), ("E", True), ("J", False)])  # fmt: skip
def test_the_larger_pool_is_the_one(tmp_path, name, shared):
    found = tier(tmp_path, name)
    assert found.shared_with_host is shared
    larger = "gtt" if shared else "vram"
    assert found.total == min(
        CASES[name][larger], CASES[name]["mem_kb"] * 1024 if shared else 1 << 60
    )


def test_a_discrete_gpu_is_not_called_unified(tmp_path):
    platform = read_platform(tree(tmp_path, "J"))
    assert platform.strix_halo is None
    assert platform.gpus[0].arch == "gfx1100"


def test_usable_is_the_least_of_all_bounds(tmp_path):
    host = CASES["A"]["mem_kb"] * 1024 - (4 << 30)
    assert tier(tmp_path / "0", "A").free == host - RESERVE
    assert tier(tmp_path / "1", "A", hip_free=20 * GIB).free == 20 * GIB
    assert tier(tmp_path / "2", "A", cgroup=str(30 * GIB)).free == 30 * GIB
    assert tier(tmp_path / "3", "B").free == CASES["B"]["gtt"]
    low = tier(tmp_path / "4", "A", available_kb=16 << 20)
    assert low.free == 10 * GIB
    assert "bound by MemAvailable" in low.source


def test_a_units_own_limit_counts_and_its_file_cache_does_not(tmp_path):
    """systemd's MemoryMax is set on the unit, or on the slice around it, not on the root."""
    slice_, unit = "sys/fs/cgroup/apps.slice", "sys/fs/cgroup/apps.slice/halogen.service"
    root = tree(tmp_path, "A")
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/apps.slice/halogen.service\n",
            f"{slice_}/memory.max": str(48 * GIB),
            f"{slice_}/memory.current": str(30 * GIB),
            f"{slice_}/memory.stat": f"anon {10 * GIB}\ninactive_file {20 * GIB}\n",
            f"{unit}/memory.max": str(40 * GIB),
            f"{unit}/memory.current": str(1 * GIB),
        },
    )
    found = read_platform(root)
    assert (found.cgroup_limit, found.cgroup_used) == (48 * GIB, 10 * GIB)
    gpu = found.strix_halo
    assert device_tier(found, gpu, ledger=Ledger()).free == 38 * GIB
    write(tmp_path, {f"{unit}/memory.max": str(32 * GIB)})
    assert device_tier(read_platform(root), gpu, ledger=Ledger()).free == 31 * GIB
    write(tmp_path, {f"{unit}/memory.max": "max", f"{slice_}/memory.max": "max"})
    assert read_platform(root).cgroup_limit is None


@pytest.mark.parametrize(
    ("path", "junk"),
    [
        ("sys/class/drm/card1/device/vendor", "no number"),
        ("sys/class/drm/card1/device/device", "0xzz"),
        ("sys/class/drm/card1/device/mem_info_gtt_total", "²³"),
        ("sys/class/kfd/kfd/topology/nodes/1/properties", "gfx_target_version many"),
        ("proc/meminfo", "\0\0MemTotal: lots kB"),
        ("sys/fs/cgroup/memory.max", "-3"),
        ("proc/sys/kernel/osrelease", ""),
        ("sys/class/drm/card1/device/pp_dpm_sclk", "fast Mhz *"),
    ],
)
def test_damaged_files_are_unknown_facts(tmp_path, path, junk):
    root = tree(tmp_path, "A")
    write(tmp_path, {path: junk})
    platform = read_platform(root)
    for gpu in platform.gpus:
        assert device_tier(platform, gpu, ledger=Ledger()).free >= 0
    list(findings(DoctorContext(root=root, live=False)))


def test_own_ledger_counts_where_the_driver_forgets(tmp_path):
    before = tier(tmp_path / "0", "A").free
    # the driver says nothing is used and MemAvailable still counts our pages as cache
    assert tier(tmp_path / "1", "A", ledger=40 * GIB).free == before - 40 * GIB
    # where the driver counts them, they are not counted twice
    assert tier(tmp_path / "3", "B", gtt_used=40 * GIB).free == CASES["B"]["gtt"] - 40 * GIB
    tracked = tier(tmp_path / "2", "B", ledger=40 * GIB, gtt_used=40 * GIB)
    assert tracked.free == CASES["B"]["gtt"] - 40 * GIB


def test_memory_that_the_gpu_holds_is_not_available_whatever_linux_says(tmp_path):
    """MemAvailable takes pinned weights for cache that it could drop."""
    total = CASES["A"]["mem_kb"] * 1024
    over = {"gtt_used": 68 * GIB}
    assert tier(tmp_path / "1", "A", ledger=68 * GIB, **over).free == total - 68 * GIB - RESERVE
    leaked = tier(tmp_path / "2", "H")
    assert leaked.free == total - CASES["H"]["gtt_used"] - RESERVE
    honest = (total - 80 * GIB) // 1024
    found = tier(tmp_path / "3", "A", ledger=68 * GIB, available_kb=honest, **over)
    assert found.free == honest * 1024 - RESERVE, "counted once"


def test_a_carve_out_has_what_driver_and_ledger_leave(tmp_path):
    whole = CASES["C"]["vram"]
    assert tier(tmp_path / "0", "C", ledger=40 * GIB).free == whole - 40 * GIB
    assert tier(tmp_path / "1", "C", ledger=GIB, vram_used=50 * GIB).free == whole - 50 * GIB
    assert tier(tmp_path / "2", "C", hip_free=20 * GIB).free == 20 * GIB


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 5), (1, 4096), (4095, 9000), (8192, 12288), (777, 0)]
)
def test_spans_are_read_exactly(tmp_path, offset, size):
    data = np.random.default_rng(0).integers(0, 256, 30000, dtype=np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(data.tobytes())
    assert (read_span(str(path), offset, size) == data[offset : offset + size]).all()


@pytest.mark.parametrize("chunk", [4096, 8192])
def test_spans_of_many_chunks_are_read_exactly(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(direct_read, "CHUNK", chunk)
    data = np.random.default_rng(1).integers(0, 256, 50_000, dtype=np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(data.tobytes())
    for offset, size in ((0, 50_000), (1, 40_000), (4095, 8194), (12_288, 4096)):
        assert (read_span(str(path), offset, size) == data[offset : offset + size]).all()


def test_a_short_file_is_an_error(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 100)
    with pytest.raises(OSError, match="ends at"):
        read_span(str(path), 50, 100)


def test_a_view_of_a_map_knows_its_file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(200)))
    view = np.memmap(path, np.uint8, mode="r", offset=16)[20:60][4:]
    assert file_span(view) == (str(path), 40)
    assert (read_span(*file_span(view), view.size) == view).all()
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert file_span(np.frombuffer(mapped, np.uint8)[7:20]) == (str(path), 7)
    assert file_span(np.zeros(3, np.uint8)) is None


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_that_is_gone_is_not_read_again(tmp_path, replaced):
    """`halogen pull` puts a new file in an old one's place; the map is of the old one."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(200))
    view = np.memmap(path, np.uint8, mode="r")
    if replaced:
        (tmp_path / "new").write_bytes(b"x" * 200)
        (tmp_path / "new").replace(path)
    else:
        path.unlink()
    assert file_span(view) is None


def test_locking_tells_what_it_did():
    page = np.zeros(8192, np.uint8)
    done = lock(page.__array_interface__["data"][0], page.nbytes)
    assert done.bytes == locked_bytes()
    assert (done.reason is None) == (done.bytes >= page.nbytes)
    reason = lock_reason(errno.EPERM, 1 << 40)
    assert os.strerror(errno.EPERM) in reason.text
    assert "LimitMEMLOCK" in reason.hint


def test_no_limit_is_blamed_for_pages_that_cannot_be_locked():
    """Such as device memory that the host does not map: here, pages that nobody may touch."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, 4096, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    reason = lock(address, 4096).reason
    libc.munmap(address, 4096)
    assert reason.code == "memlock_unmapped"
    assert "mlock=off" in reason.hint
    assert "LimitMEMLOCK" not in reason.hint
