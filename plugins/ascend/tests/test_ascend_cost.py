"""The cost model: calibrated within what it claims, monotone, never under the roofline."""

import json
import xml.etree.ElementTree as ET
from itertools import pairwise

import attrs
import numpy as np
import pytest
from ascend_steps import BLOCK, open_sim
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from halogen_ascend.cli import cube_busy, explain_step_command
from halogen_ascend.explain import StepSize, explain_step, shape_called
from halogen_ascend.options import sim_options
from halogen_ascend.sim.collectives import ring_seconds
from halogen_ascend.sim.cost import Conditions, place, roofline
from halogen_ascend.sim.cube import gemm_costs
from halogen_ascend.sim.profiles import profile, profiles
from halogen_ascend.sim.tasks import MicroTask, Program, split
from halogen_core.spi import BackendOptions, ConfigError

# Qwen3-14B decode products on one A3 die, 16 rows bf16: name, K, N, blocks, measured microseconds
PUBLIC = [
    ("q", 5120, 5120, 20, 26.0),
    ("k", 5120, 1024, 8, 18.2),
    ("v", 5120, 1024, 8, 17.8),
    ("o", 5120, 5120, 40, 59.5),
    ("gate", 5120, 17408, 34, 136.0),
    ("up", 5120, 17408, 34, 145.7),
    ("down", 17408, 5120, 40, 161.3),
]


@pytest.mark.parametrize(("name", "k", "n", "blocks", "measured"), PUBLIC)
def test_each_public_product_is_within_its_bound(name, k, n, blocks, measured):
    program = Program(name, gemm_costs(16, k, n, itemsize=2, blocks=blocks))
    microseconds = place(program, profile("910C")).makespan * 1e6
    assert 0.6 <= microseconds / measured <= 1.5, f"{name}: {microseconds / measured:.2f}"


tasks = st.builds(
    MicroTask,
    unit=st.sampled_from(["cube", "vector"]),
    label=st.just("t"),
    macs=st.integers(0, 10**8),
    itemsize=st.sampled_from([1, 2, 4]),
    hbm_bytes=st.integers(0, 10**7),
    l2_bytes=st.integers(0, 10**6),
    bank=st.none() | st.integers(0, 7),
)


@given(st.lists(tasks, min_size=1, max_size=60), st.data())
@settings(max_examples=60, deadline=None)
def test_more_bytes_never_take_less_time_and_nothing_beats_the_roofline(given_tasks, data):
    part = profile(data.draw(st.sampled_from(sorted(profiles()))))
    program = Program("any", given_tasks)
    before = place(program, part)
    assert before.makespan >= roofline(program, part)
    index = data.draw(st.integers(0, len(given_tasks) - 1))
    more = attrs.evolve(given_tasks[index], hbm_bytes=given_tasks[index].hbm_bytes + 10**6)
    grown = Program("any", [*given_tasks[:index], more, *given_tasks[index + 1 :]])
    assert place(grown, part).makespan >= before.makespan


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
@settings(max_examples=40, deadline=None)
def test_a_schedule_respects_the_graph_and_one_task_per_core(backs):
    program = Program("dag")
    for index, back in enumerate(backs):
        after = (index - back,) if 0 < back <= index else ()
        program.add(MicroTask(unit="cube", label=str(index), hbm_bytes=1000, after=after))
    plan = place(program, profile("tiny"))
    at = {p.task: p for p in plan.placed}
    for index, task in enumerate(program.tasks):
        assert all(at[index].start >= at[i].end for i in task.after)
    for core in range(4):
        mine = sorted((p for p in plan.placed if p.core == core), key=lambda p: p.start)
        assert all(a.end <= b.start for a, b in pairwise(mine))
    with pytest.raises(ValueError, match="not before it"):
        program.add(MicroTask(unit="cube", label="cycle", after=(len(program.tasks),)))


def test_eight_heads_make_eight_tasks_and_blocks_make_more():
    shape = attrs.evolve(shape_called("qwen3-14b"), heads=8, kv_heads=8)
    options = options_of("910B2")

    def cube_tasks(split_blocks, context):
        told = explain(attrs.evolve(options, kv_split=split_blocks), shape, context=context)
        return sum(p.unit == "cube" for p in told.of("attention").schedule.placed)

    assert cube_tasks(0, 8 * BLOCK) == 8
    assert cube_tasks(4, 8 * BLOCK) == 16
    assert cube_tasks(1, 8 * BLOCK) == 64


def test_many_tasks_fold_onto_the_cores_there_are():
    # a grid of 123,408 blocks is refused by the real launch (limit 65,535)
    program = Program("wide", [MicroTask(unit="vector", label="t")] * 70_000)
    plan = place(program, profile("910B3"))
    assert {p.core for p in plan.placed} == set(range(40))
    assert plan.makespan == pytest.approx(70_000 / 40 * 2e-6)


def test_splitting_over_kv_blocks_lifts_utilisation_at_8k():
    options = options_of("910B2")
    shape = shape_called("qwen3-14b")
    per_head = explain(attrs.evolve(options, kv_split=0), shape, context=8192)
    by_block = explain(options, shape, context=8192)
    assert cube_busy(per_head, options) <= 0.34  # 8 of 24 cores have a head
    assert cube_busy(by_block, options) >= 0.85
    a, b = (t.of("attention").schedule.makespan for t in (per_head, by_block))
    assert a / b > 1.4


def test_near_banks_are_preferred_and_crossing_costs():
    part, now = profile("910B2"), Conditions(groups=8)
    near = Program(
        "near", [MicroTask(unit="cube", label="t", hbm_bytes=10**6, bank=b % 8) for b in range(24)]
    )
    assert place(near, part, now).crossed_bytes == 0
    far = Program("far", [MicroTask(unit="cube", label="t", hbm_bytes=10**6, bank=0)] * 24)
    crossed = place(far, part, now)
    assert crossed.crossed_bytes == 12 * 10**6
    assert crossed.makespan > place(near, part, now).makespan


def test_the_timeline_is_drawn_and_traced(tmp_path):
    svg, trace = tmp_path / "step.svg", tmp_path / "step.json"
    done = CliRunner().invoke(
        explain_step_command,
        ["--context", "2048", "--svg", str(svg), "--trace", str(trace)],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    assert "attention per head: 33% of cube time busy" in done.output
    boxes = ET.fromstring(svg.read_text()).findall(".//{*}rect")
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(boxes) > len(spans) > 100
    assert {e["pid"] for e in spans} == {1, 2}
    by_core = {}
    for event in spans:
        by_core.setdefault((event["pid"], event["tid"]), []).append(event)
    for mine in by_core.values():
        mine.sort(key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in pairwise(mine))


def test_a_step_takes_what_its_layers_take_however_many_are_drawn():
    options, shape = options_of("910B2"), shape_called("qwen3-14b")
    one, four = (explain_step(options, shape, StepSize(layers=n)) for n in (1, 4))
    assert four.step_s == pytest.approx(one.step_s, rel=1e-6)
    assert len(four.spans) > 3 * len(one.spans) / 2
    # nothing but ops in the drawing: spans touch each other but for their launches
    for a, b in pairwise(one.spans):
        assert b.start - a.end == pytest.approx(options.launch_s)


def test_ranks_share_a_layer_and_pay_for_sums():
    options, shape = options_of("910B2"), shape_called("qwen3-14b")
    one, two = (explain_step(options, shape, StepSize(ranks=n)) for n in (1, 2))
    assert [s.op for s in two.spans].count("all_reduce") == 2
    assert "all_reduce" not in {s.op for s in one.spans}
    assert two.of("mlp").schedule.makespan < 0.6 * one.of("mlp").schedule.makespan
    assert 0.5 * one.step_s < two.step_s < one.step_s
    long = StepSize(queries=8192, ranks=2)
    sums = explain_step(options, shape, long).of("all_reduce").schedule.makespan
    assert sums == pytest.approx(ring_seconds(8192 * 5120 * 2, 2))
    with pytest.raises(ConfigError, match=r"heads 40, kv_heads 8, ffn 17408 do not divide over 3"):
        shape.share(3)


def test_sums_between_ranks_are_told(tmp_path):
    svg = tmp_path / "step.svg"
    told = CliRunner().invoke(
        explain_step_command, ["--ranks", "2", "--svg", str(svg)], catch_exceptions=False
    )
    assert [r.split()[0] for r in told.output.splitlines()].count("all_reduce") == 2
    assert "one of 2 ranks" in svg.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "ascend:0"], "`ascend:0` is a real one"),
        (["--device", "ascend"], "ascend:sim:910B2"),
        (["--svg", "/nowhere/at/all.svg"], "`/nowhere/at/all.svg` cannot be written: No such file"),
        (["--queries", "9", "--context", "8"], "9 new tokens do not fit a context of 8"),
        (["--backend", "cuda"], "cannot explain a step"),
        (["--shape", "gpt-9"], "known: qwen3-14b"),
        (["--ranks", "5"], "kv_heads 8"),
    ],
)
def test_what_cannot_be_explained_is_refused(arguments, words):
    done = CliRunner().invoke(explain_step_command, arguments)
    assert isinstance(done.exception, ConfigError)
    assert words in f"{done.exception} {done.exception.fix}"


def test_nothing_is_kept_of_a_step_that_nobody_watches():
    backend = open_sim()
    x = backend.upload(np.ones((4, 16), np.float32))
    backend.ops.add(x, x)
    line = backend.device.timeline
    assert (line.spans, line.launches) == ([], 1)
    line.watching = True
    backend.ops.add(x, x)
    assert [span.op for span in line.spans] == ["add"]
    assert 0 < backend.counters().gauges["core_utilisation"] <= 1


@pytest.mark.parametrize("context", [32 << 10, 128 << 10])
def test_a_long_context_is_planned_within_its_bytes(context):
    options, shape = options_of("910B2"), shape_called("qwen3-14b")
    told = explain_step(options, shape, StepSize(context=context)).of("attention").schedule
    kv_bytes = 2 * context * shape.kv_heads * shape.head_dim * 2
    assert told.hbm_bytes == kv_bytes
    assert kv_bytes / options.part.hbm_bandwidth <= told.makespan < 2e-3


def test_split_is_even_and_whole():
    assert split(100, 24, 16) == [
        (0, 16),
        (16, 32),
        (32, 48),
        (48, 64),
        (64, 80),
        (80, 96),
        (96, 100),
    ]
    assert split(0, 4) == []
    assert split(5, 2) == [(0, 2), (2, 5)]


def options_of(name, **extra):
    return sim_options(BackendOptions(device=f"ascend:sim:{name}", extra=extra))


def explain(options, shape, *, context):
    return explain_step(options, shape, StepSize(context=context))
