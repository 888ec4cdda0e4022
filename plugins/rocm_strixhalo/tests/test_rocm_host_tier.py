"""A host tier beside a pool in GTT: folded into it, copied beyond GTT, refused beyond both."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from halogen_core.errors import OutOfMemory
from halogen_core.kv import one_memory
from halogen_core.spi import BackendOptions, KVSpec, MemoryRequest
from halogen_rocm.backend import RocmBackend

sys.path.insert(0, str(Path(__file__).parent))
from trees import tree

GIB = 1 << 30
RESERVE = 6 * GIB


def division(tmp_path, name, host_gib, **more):
    """The pool of `name`'s machine for a model of 20 GiB whose exact KV pool is 8 GiB."""
    root = tree(tmp_path, name, **more)
    backend = RocmBackend(BackendOptions(extra={"mlock": "off"}), root=root, device="cpu")
    layout = backend.kv_layout(KVSpec(num_layers=64, num_kv_heads=8, head_dim=128, block_size=64))
    request = MemoryRequest(
        static_bytes=20 * GIB, temp_bytes=GIB, kv_layout=layout, kv_bytes=8 * GIB
    )
    found = one_memory.divide(backend, request, host_gib * GIB)
    return backend, layout.bytes_per_block, found


@pytest.mark.parametrize("name", ["A", "B", "E", "F"])
def test_in_gtt_the_tier_is_blocks_of_the_pool(tmp_path, name):
    _, block, found = division(tmp_path, name, 10)
    assert block == 16 << 20
    assert found.host_bytes == 0
    # one block of the exact pool is the trash block's
    assert found.plan.num_blocks == 8 * GIB // block - 1 + 10 * GIB // block
    assert any("640 of its blocks are the pool's own" in line for line in found.plan.reasons)


def test_what_gtt_leaves_to_the_host_is_a_tier_of_copies(tmp_path):
    """Machine B: GTT maps half of RAM, so the host has more than the GPU can get."""
    backend, block, found = division(tmp_path, "B", 60)
    device, host = backend.memory()
    assert device.free < host.free, "GTT binds"
    pool = (device.free - 21 * GIB) // block
    assert found.plan.num_blocks == pool - 1
    assert found.host_bytes == 60 * GIB - (found.plan.num_blocks - 511) * block
    assert found.host_bytes <= host.free - device.free
    assert any("where the device cannot reach, and are copied" in r for r in found.plan.reasons)


@pytest.mark.parametrize("name", ["A", "B"])
def test_what_neither_has_is_refused_before_anything_is_taken(tmp_path, name):
    with pytest.raises(OutOfMemory, match="the same memory as the KV pool") as caught:
        division(tmp_path, name, 110)
    assert caught.value.code == "HRT-3305"
    most = int(caught.value.fix.split("at most ")[1].split("MiB")[0])
    _, _, found = division(tmp_path / "again", name, most / 1024)
    beyond = found.host_bytes
    assert (beyond == 0) == (name == "A")


def test_a_cgroup_binds_pool_and_tier_alike(tmp_path):
    with pytest.raises(OutOfMemory, match="cgroup") as caught:
        division(tmp_path, "A", 10, cgroup=str(32 * GIB))
    assert caught.value.code == "HRT-3305"


def test_a_carve_out_is_memory_apart_and_keeps_its_tier(tmp_path):
    """Machine C: 96 GiB are the GPU's and the host's 31 GiB are not."""
    backend, block, found = division(tmp_path, "C", 10)
    assert not backend.capabilities().unified_memory
    assert found.host_bytes == 10 * GIB
    assert found.plan.num_blocks == 8 * GIB // block - 1
    device, host = backend.memory()
    assert device.total + host.total > 120 * GIB
    assert host.free == (31 << 30) - 4 * GIB - RESERVE


def test_the_driver_that_counts_nothing_gives_no_room_twice(tmp_path):
    """What we hold counts against host and device, though gtt_used stays at zero."""
    backend, _, _ = division(tmp_path, "A", 0)
    before = backend.memory()
    layout = backend.kv_layout(KVSpec(num_layers=2, num_kv_heads=2, head_dim=64, block_size=16))
    backend.kv_alloc(layout, 63)
    held = 64 * layout.bytes_per_block
    assert [b.free - a.free for b, a in zip(before, backend.memory(), strict=True)] == [held, held]
