"""Four names for the pool's size, one meaning."""

import pytest

from halogen_core.errors import ConfigError, OutOfMemory
from halogen_core.kv.sizing import GIB, PoolWish, plan_pool, usable_bytes
from halogen_core.spi import MemoryTier


def test_an_exact_size_is_exact():
    assert PoolWish(pool_size=96 * GIB).resolved().bytes == 96 * GIB
    assert PoolWish(kv_cache_pool_gb=4.0).resolved().bytes == 4 * GIB


def test_a_share_is_of_what_is_left():
    size = PoolWish(gpu_memory_utilization=0.6).resolved()
    plan = plan_pool(size, usable=32 * GIB, taken=20 * GIB, bytes_per_block=1 << 20)
    assert plan.num_blocks == int(0.6 * 12 * GIB) >> 20
    assert "32.00 GiB usable - 20.00 GiB for weights" in plan.reasons[0]


def test_the_default_is_a_share():
    assert PoolWish().resolved().ratio == 0.85


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("pool_size", "kv_cache_ratio"),
        ("kv_cache_pool_gb", "pool_size"),
        ("kv_cache_pool_gb", "kv_cache_ratio"),
        ("gpu_memory_utilization", "kv_cache_ratio"),
    ],
)
def test_two_names_are_a_conflict_that_names_both(first, second):
    with pytest.raises(ConfigError) as caught:
        PoolWish(**{first: 1, second: 1}).resolved()
    assert f"`{first}`" in str(caught.value)
    assert f"`{second}`" in str(caught.value)


@pytest.mark.parametrize("ratio", [0, -1, 1.01])
def test_a_share_is_between_0_and_1(ratio):
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        PoolWish(kv_cache_ratio=ratio).resolved()


def test_the_cgroup_bounds_memory_of_the_host_only():
    host = MemoryTier(name="host", total=64 * GIB, free=60 * GIB)
    unified = MemoryTier(name="device", total=96 * GIB, free=90 * GIB, shared_with_host=True)
    own = MemoryTier(name="device", total=80 * GIB, free=79 * GIB)
    limit = {"cgroup_limit": 40 * GIB, "cgroup_used": 10 * GIB}
    assert usable_bytes(host, **limit) == 30 * GIB
    assert usable_bytes(unified, **limit) == 30 * GIB
    assert usable_bytes(own, **limit) == 79 * GIB
    assert usable_bytes(host) == 60 * GIB


def test_a_pool_that_exceeds_memory_is_refused_with_the_sums():
    with pytest.raises(OutOfMemory, match=r"96.00 GiB; 64.00 GiB usable - 20.00 GiB .* 44.00 GiB"):
        plan_pool(
            PoolWish(pool_size=96 * GIB).resolved(),
            usable=64 * GIB,
            taken=20 * GIB,
            bytes_per_block=1 << 20,
        )


def test_a_pool_too_small_for_one_sequence_is_refused_with_the_sums():
    with pytest.raises(OutOfMemory, match="has 1024 blocks of 1048576 bytes; .* needs 2048"):
        plan_pool(
            PoolWish(kv_cache_pool_gb=1).resolved(),
            usable=64 * GIB,
            taken=20 * GIB,
            bytes_per_block=1 << 20,
            min_blocks=2048,
        )


def test_weights_larger_than_memory_are_told_as_such():
    with pytest.raises(OutOfMemory, match="leaves -1.00 GiB"):
        plan_pool(PoolWish().resolved(), usable=GIB, taken=2 * GIB, bytes_per_block=1)
