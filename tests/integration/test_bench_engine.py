"""`halogen bench` and the warm-up on a real engine over a tiny model, with a clock of steps."""

import itertools

import attrs
import pytest

from halogen_core.cli.bench import bounds_of, load_of
from halogen_core.cli.bench_runs import Work, measure
from halogen_core.cli.flash_fit import measure_flash
from halogen_core.cli.profiles import Profile
from halogen_core.engine.rehearsal import Part, StepKind, rehearse, step_kinds
from halogen_core.errors import ConfigError
from halogen_core.spi import Limits


@pytest.fixture
def ticks():
    counter = itertools.count()
    return lambda: next(counter) * 0.001


@pytest.mark.parametrize(("kind", "batch"), [("prefill", 3), ("decode", 3), ("mixed", 4)])
def test_every_work_runs_and_counts_all_tokens(make_engine, ticks, kind, batch):
    engine = make_engine(64)
    found = measure(engine, Work(kind=kind, batch=batch, prompt=12, tokens=6), 2, clock=ticks)
    assert len(found.runs) == 2
    for run in found.runs:
        assert len(run.ttft) == batch
        assert len(run.gaps) == (0 if kind == "prefill" else batch * 5)
        assert run.rate > 0
    assert engine.blocks.stats().active == 0


def test_runs_do_not_help_each_other_by_the_prefix_cache(make_engine, ticks):
    engine = make_engine(64)
    measure(engine, Work(kind="prefill", batch=2, prompt=32, tokens=2), 2, clock=ticks)
    assert engine.stats().counters["prompt_tokens"] == 3 * 2 * 32


def test_the_warm_up_meets_every_kind_of_step_and_leaves_no_trace(make_engine, checkpoint):
    engine = make_engine(64, block_size=8)
    kinds = step_kinds(Limits(token_buckets=(1, 2, 4, 8)), max_batch=8, max_tokens=64, context=128)
    rows = {len(k.parts) for k in kinds if all(p.count == 1 for p in k.parts)}
    assert rows == {1, 2, 4, 8}
    assert any(k.sampled for k in kinds)
    prompts = {k.parts[0].count for k in kinds if len(k.parts) == 1}
    assert {1, 2, 3, 16, 17, 32, 33, 64} <= prompts
    mixed = {len(k.parts) for k in kinds if k.parts[0].count > 1 and k.parts[-1].count == 1}
    assert {2, 4, 8} <= mixed, "kernels are compiled by powers of two of sequences"
    assert {k.sampled for k in kinds if k.masked} == {False, True}
    for kind in kinds:
        step = rehearse(kind, engine.runner.kv, vocab=engine.info.vocab_size)
        assert (step.batch.sampling.mask is not None) == kind.masked
        assert engine.runner.step(step.batch, step.shape).token_ids.shape == (len(kind.parts),)
    assert engine.blocks.stats().free == 64
    fresh = measure(make_engine(64), Work(kind="decode", batch=2, prompt=9, tokens=4), 1)
    warm = measure(engine, Work(kind="decode", batch=2, prompt=9, tokens=4), 1)
    assert len(fresh.runs) == len(warm.runs)


def test_rehearsed_sequences_share_blocks_where_the_pool_is_small(make_engine):
    kv = make_engine(4, block_size=8, max_context=32).runner.kv
    step = rehearse(StepKind(parts=(Part(context=31),) * 3), kv)
    assert step.batch.block_tables.max() < 4
    assert step.batch.seq_lens.tolist() == [32, 32, 32]


def test_bounds_follow_the_model(tiny_gguf, make_engine):
    engine = make_engine(64, model_path=str(tiny_gguf))
    work = Work(kind="decode", batch=2, prompt=30, tokens=20)
    profile = Profile(
        name="p", backend="b", device="d", source="s", free=0, reserve=0,
        bandwidth={"best": 1e9, "peak": 2e9}, compute={"tuned": 1e12, "peak": 2e12},
        weight_formats={}, kv_dtypes=(), kv_block_sizes=(), head_dim_max=0, fallback_ops={},
    )  # fmt: skip
    load = load_of(engine, work, profile)
    # two layers, two KV heads of 16, K and V in f32
    assert load.kv_bytes == 40 * 2 * 2 * 2 * 16 * 4
    found = bounds_of(engine, work, profile)
    assert found["bound_best"] == pytest.approx(2e9 / (load.weight_bytes + 2 * load.kv_bytes))
    assert found["bound_peak"] == pytest.approx(2 * found["bound_best"])
    # a device that keeps 32 bits in 16 reads half of the matrices
    halved = attrs.evolve(profile, packed_bits={"F32": 16})
    less = load.weight_bytes - load_of(engine, work, halved).weight_bytes
    norms = 4 * (2 * 2 + 1) * 48
    assert less == (load.weight_bytes - norms) / 2


def test_a_backend_with_one_path_has_nothing_to_fit(make_engine):
    with pytest.raises(ConfigError, match="one attention path"):
        measure_flash(make_engine(16), rows=1, repeats=1, progress=print)
