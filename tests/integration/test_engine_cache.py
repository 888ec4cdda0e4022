"""The prefix cache beyond the device pool: host tier and snapshots give the same tokens."""

from math import prod

import pytest

from halogen_core.errors import HalogenError
from halogen_core.kv.tiers import unknown_cost
from halogen_core.spi import kv_block_shape

from .conftest import request, run

PROMPT = list(range(64))


def always_move(engine):
    """Without the cost model: on a model this tiny computing again is often the cheaper way."""
    engine.blocks.residency.tiers.recompute_s = unknown_cost
    return engine


def others(n):
    return [request(f"o{i}", [(7 * i + j) % 97 for j in range(60)]) for i in range(n)]


def test_blocks_come_back_from_the_host_tier(make_engine):
    cold = run(make_engine(), request("cold", PROMPT))[0]["cold"]
    engine = always_move(make_engine(num_blocks=12, host_kv_bytes=8 << 20))
    run(engine, request("first", PROMPT))
    run(engine, *others(4))
    tokens, last = run(engine, request("again", PROMPT))
    assert tokens["again"] == cold
    assert last["again"].cached_tokens >= 56


@pytest.mark.parametrize("host", [0, 2])
def test_blocks_come_back_from_the_disk_tier(make_engine, tmp_path, host):
    """With two blocks of host memory above it, and as the only tier."""
    whole = make_engine()
    cold = run(whole, request("cold", PROMPT))[0]["cold"]
    block = prod(kv_block_shape(whole.runner.kv.layout.spec, 1))
    folder = tmp_path / "made" / "here"
    engine = make_engine(
        num_blocks=12,
        host_kv_bytes=host * block,
        disk_kv_bytes=8 << 20,
        disk_kv_dir=str(folder),
    )
    always_move(engine)
    run(engine, request("first", PROMPT))
    run(engine, *others(4))
    tokens, last = run(engine, request("again", PROMPT))
    assert tokens["again"] == cold
    assert last["again"].cached_tokens >= 56
    assert list(folder.iterdir()) == []  # the file has no name


def test_on_one_memory_the_host_tier_is_part_of_the_pool(make_engine):
    """Nothing is copied: what would have moved is found where it was computed."""
    cold = run(make_engine(), request("cold", PROMPT))[0]["cold"]
    sizes = {"max_batch": 1, "max_context": 96}
    alone = make_engine(**sizes)
    block = alone.runner.kv.layout.bytes_per_block
    engine = make_engine(**sizes, host_kv_bytes=100 * block)
    assert engine.plan.num_blocks == alone.plan.num_blocks + 100
    assert engine.runner.kv.num_blocks == engine.plan.num_blocks
    assert engine.blocks.residency.tiers is None
    assert any("100 of its blocks are the pool's own" in line for line in engine.info.reasons)
    for one in (alone, engine):
        run(one, request("first", PROMPT))
        run(one, *others(4))
    assert run(alone, request("again", PROMPT))[1]["again"].cached_tokens < 56
    tokens, last = run(engine, request("again", PROMPT))
    assert tokens["again"] == cold
    assert last["again"].cached_tokens >= 56
    assert set(engine.blocks.residency.evictions.values()) == {0}


def test_a_tier_that_cannot_be_is_refused(make_engine, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HalogenError, match=r"HRT-3304.*disk tier"):
        make_engine(disk_kv_bytes=8 << 20, disk_kv_dir=str(tmp_path / "file"))
    with pytest.raises(HalogenError, match="`host_pool_size` is 5 bytes; one KV block takes"):
        make_engine(host_kv_bytes=5)
    with pytest.raises(HalogenError, match=r"HRT-3305.*at most \d+MiB"):
        make_engine(host_kv_bytes=1 << 60)


@pytest.mark.parametrize(("quota", "pinned"), [(0.0, 0), (0.5, 6)])
def test_sessions_pin_no_more_than_their_quota(make_engine, quota, pinned):
    engine = make_engine(num_blocks=12, pin_quota=quota, eviction_policy="session_priority+lru")
    run(engine, request("a", PROMPT, session="s", priority=1))
    assert engine.stats().blocks_pinned == pinned


def test_without_a_tier_they_are_computed_again(make_engine):
    engine = make_engine(num_blocks=12)
    run(engine, request("first", PROMPT))
    run(engine, *others(4))
    _, last = run(engine, request("again", PROMPT))
    assert last["again"].cached_tokens < 56


def test_a_snapshot_outlives_the_engine(make_engine, tmp_path):
    path = str(tmp_path / "cache.halogenkv")
    engine = make_engine()
    cold = run(engine, request("cold", PROMPT))[0]["cold"]
    saved = engine.save_cache(path)
    assert saved >= 8
    fresh = make_engine()
    assert fresh.load_cache(path) == saved
    tokens, last = run(fresh, request("warm", PROMPT))
    assert tokens["warm"] == cold
    assert last["warm"].cached_tokens >= 56


def test_a_foreign_or_damaged_snapshot_is_refused(make_engine, tmp_path):
    path = tmp_path / "cache.halogenkv"
    engine = make_engine()
    run(engine, request("cold", PROMPT))
    engine.save_cache(str(path))
    with pytest.raises(HalogenError, match="HRT-3310"):
        make_engine(block_size=16).load_cache(str(path))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    fresh = make_engine()
    with pytest.raises(HalogenError, match="HRT-3310"):
        fresh.load_cache(str(path))
    _, last = run(fresh, request("cold", PROMPT))
    assert last["cold"].cached_tokens == 0
