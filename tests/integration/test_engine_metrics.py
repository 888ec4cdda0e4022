"""What `/metrics` says of a real engine, against what really happened; all of it documented."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from halogen_core.kv.tiers import unknown_cost
from halogen_core.server.metrics import Metrics

from .conftest import request, run

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def scrape(engine):
    """The page as a client parses it: {(sample, labels as a set of pairs): value}."""
    text = Metrics().exposition(engine.info, engine.stats()).decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(page, name, **labels):
    return page[name, frozenset(labels.items())]


def busy(engine):
    """Prompts that share nothing, so that a small cache has to give up blocks."""
    for i in range(6):
        run(engine, request(f"r{i}", [(7 * i + j) % 97 for j in range(60)]))
    return engine


@pytest.fixture
def plain(make_engine):
    return busy(make_engine(num_blocks=12, max_context=80, eviction_policy="cheapest_loss"))


@pytest.fixture
def tiered(make_engine):
    engine = make_engine(num_blocks=12, max_context=80, host_kv_bytes=64 << 10)
    engine.blocks.residency.tiers.recompute_s = unknown_cost
    return busy(engine)


def test_steps_are_timed_by_phase(plain):
    page, steps = scrape(plain), plain.stats().step
    seconds = {
        phase: value(page, "halogen_step_seconds_count", phase=phase)
        for phase in ("schedule", "prefill", "decode", "results")
    }
    assert seconds["schedule"] >= steps
    assert seconds["prefill"] + seconds["decode"] == seconds["results"] == steps
    assert seconds["prefill"] >= 6
    assert 0 < value(page, "halogen_step_seconds_sum", phase="decode") < 60
    assert (
        value(page, "halogen_step_seconds_bucket", phase="decode", le="+Inf") == seconds["decode"]
    )
    assert value(page, "halogen_step_tokens_sum") == 6 * (60 + 11)


def test_evictions_tell_policy_and_where_to(plain, tiered):
    page = scrape(plain)
    labels = {"policy": "cheapest_loss"}
    forgotten = value(page, "halogen_kv_evictions_total", reason="forgotten", **labels)
    assert forgotten > 20
    assert value(page, "halogen_kv_evictions_total", reason="moved", **labels) == 0
    page = scrape(tiered)
    moved = value(page, "halogen_kv_evictions_total", reason="moved", policy="lru")
    full = value(page, "halogen_kv_evictions_total", reason="tier_full", policy="lru")
    used = value(page, "halogen_kv_tier_blocks", tier="host", state="used")
    assert moved > 0
    assert value(page, "halogen_kv_evictions_total", reason="forgotten", policy="lru") == 0
    assert moved - full == used, "nothing came back, so what was moved is there or fell out"


def test_memory_is_told_by_pool_and_tier(plain):
    page = scrape(plain)
    tier = plain.plan.pools[0].tier
    pools = {pool.name: pool.bytes for pool in plain.plan.pools}
    assert {"static", "dynamic", "temp"} <= set(pools)
    for name, size in pools.items():
        assert value(page, "halogen_device_memory_bytes", tier=tier, pool=name) == size
    assert value(page, "halogen_device_memory_bytes", tier=tier, pool="free") > 0
    assert value(page, "halogen_model_load_seconds") > 0
    most = value(page, "halogen_kv_blocks_most_active")
    assert 9 <= most <= 12


def test_every_metric_is_documented(plain, tiered):
    text = DOCS.read_text(encoding="utf-8")
    names = {name for name, _ in [*scrape(plain), *scrape(tiered)]}
    families = {
        n.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for n in names
    }
    missing = {n for n in families if f"`{n}" not in text}
    assert not missing
