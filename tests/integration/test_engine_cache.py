"""The prefix cache beyond the device pool: host tier and snapshots give the same tokens."""

import pytest

from halogen_core.errors import HalogenError

from .conftest import request, run

PROMPT = list(range(64))


def others(n):
    return [request(f"o{i}", [(7 * i + j) % 97 for j in range(60)]) for i in range(n)]


def test_blocks_come_back_from_the_host_tier(make_engine):
    cold = run(make_engine(), request("cold", PROMPT))[0]["cold"]
    engine = make_engine(num_blocks=12, host_kv_bytes=8 << 20)
    run(engine, request("first", PROMPT))
    run(engine, *others(4))
    tokens, last = run(engine, request("again", PROMPT))
    assert tokens["again"] == cold
    assert last["again"].cached_tokens >= 56


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
