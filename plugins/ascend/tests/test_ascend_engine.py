"""The core's engine over the simulated NPU: batched, chunked, cached, preempted and captured are
the same tokens, and the suite certifies the backend."""

import json
import random
import subprocess
import sys

import attrs
import pytest
from ascend_steps import open_sim

from halogen_core.engine.building import assemble_engine
from halogen_core.engine.options import EngineOptions
from halogen_core.engine.protocol import GenerateRequest, SamplingParams
from halogen_core.errors import HalogenError
from halogen_core.models import config_of
from halogen_core.spi.testing import tiny_checkpoint


def engine_of(backend, model, *, blocks=None, **changes):
    fields = {"max_batch": 8, "max_batch_tokens": 64, **changes}
    options = EngineOptions(
        model_path="memory", model_id="tiny", end_token_ids=[], backend="ascend", **fields
    )
    if blocks:
        plan = backend.plan
        backend = _Limited(backend, plan, blocks)
    checkpoint = tiny_checkpoint(model, context=512)
    return assemble_engine(options, backend, checkpoint, config_of(checkpoint))


class _Limited:
    """The backend with a KV pool of exactly so many blocks."""

    def __init__(self, backend, plan, blocks):
        self._backend, self._plan, self._blocks = backend, plan, blocks

    def plan(self, request):
        return self._plan(attrs.evolve(request, min_blocks=self._blocks, max_blocks=self._blocks))

    def __getattr__(self, name):
        return getattr(self._backend, name)


def requests(count, *, seed=0, longest=200, hot=False):
    rng = random.Random(seed)
    return [
        GenerateRequest(
            request_id=f"r{i}",
            prompt_token_ids=[rng.randrange(97) for _ in range(rng.randint(1, longest))],
            max_tokens=rng.randint(2, 10),
            sampling=SamplingParams(temperature=0.9, top_p=0.9, seed=i)
            if hot and i % 2
            else SamplingParams(),
        )
        for i in range(count)
    ]


def answers(engine, given, *, spread=3):
    tokens, pending, turn = {r.request_id: [] for r in given}, list(given), 0
    while pending or engine.has_work:
        if pending and turn % spread == 0:
            engine.submit(pending.pop(0))
        if engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
        turn += 1
        assert turn < 3000, "no progress"
    return tokens


@pytest.mark.parametrize("model", ["llama", "llama-sinks", "qwen3moe", "gemma3"])
def test_together_chunked_cached_and_captured_equal_alone(model):
    given = requests(6, hot=True)
    backend = open_sim()
    together = answers(engine_of(backend, model), given)
    assert backend.counters().counters["graph_replays"] > 0
    plain = open_sim(graph_buckets="")
    alone = engine_of(plain, model, max_batch_tokens=512, prefix_cache=False)
    for one in given:
        assert answers(alone, [one])[one.request_id] == together[one.request_id]
    assert plain.counters().counters["graph_replays"] == 0


def test_preempted_equals_undisturbed():
    given = requests(6, seed=3, longest=150)
    given = [attrs_of(r, max_tokens=60) for r in given]
    roomy = answers(engine_of(open_sim(), "llama"), given, spread=1)
    tight_engine = engine_of(open_sim(), "llama", blocks=5)
    tight = answers(tight_engine, given, spread=1)
    assert tight == roomy
    counters = tight_engine.stats().counters
    assert any("preempt" in name and value > 0 for name, value in counters.items()), counters


def attrs_of(request, **changes):
    import msgspec

    return msgspec.structs.replace(request, **changes)


def test_a_lost_device_ends_the_step_with_its_name():
    backend = open_sim(faults="device_lost@40")
    engine = engine_of(backend, "llama")
    with pytest.raises(HalogenError, match="submission 41"):
        answers(engine, requests(3))


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["910C"])
def test_the_conformance_suite_certifies_the_backend(profile, tmp_path):
    command = [sys.executable, "-m", "halogen_core.cli", "conform", "--backend", "ascend"]
    command += ["--device", f"ascend:sim:{profile}", "--level", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    report = json.loads((tmp_path / "report.json").read_text())
    bad = [
        r["id"] for r in report["results"] if r["status"] not in ("PASS", "FILTERED", "UNSUPPORTED")
    ]
    assert done.returncode == 0, (bad, done.stdout[-2000:], done.stderr[-2000:])
    assert bad == []
    assert report["level_certified"] == 3
