"""What a request leaves behind: nothing for the cycle collector, which hardly ever runs."""

import gc
import weakref

import pytest

from halogen_core.engine.garbage import EVERY_STEPS, SetAside
from halogen_core.engine.protocol import SamplingParams

from .conftest import request, run


@pytest.fixture
def collector_off():
    gc.collect()
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


def test_requests_make_no_cycles(make_engine, collector_off):
    """Answers, stops, refusals, aborts and preemptions: reference counts free all of it."""
    engine = make_engine(num_blocks=12, max_context=64)

    def load(salt):
        sampling = SamplingParams(temperature=1.0, repetition_penalty=1.2, seed=1)
        run(
            engine,
            request("a", [salt, *range(30)]),
            request("b", range(20, 50), sampling=sampling, num_logprobs=2),
            request("c", [salt, 2], prompt_logprobs=True, num_logprobs=0),
            request("bad", range(80)),
            request("gone", range(40)),
            abort_at={"gone": 2},
        )

    load(0)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for salt in range(1, 6):
            load(salt)
        gc.collect()
        ours = [o for o in gc.garbage if type(o).__module__.startswith("halogen")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert ours == []


def test_cycles_that_grew_old_before_they_were_dropped_are_not_set_aside(collector_off):
    """As a compiler leaves them: alive through young collections, garbage when it is done."""
    collector = SetAside()
    tree = Node()
    gone = weakref.ref(tree)
    for generation in (0, 1):
        gc.collect(generation)
    del tree
    assert gone() is not None
    collector.after_step(EVERY_STEPS)
    assert gone() is None


class Node:
    """One object that refers to itself."""

    def __init__(self):
        self.parent = self


def test_what_lives_on_is_seen_by_no_later_collection(collector_off):
    """A heap of 200,000 objects, as of a large cache: collections stay as cheap as without it."""
    keep = [[] for _ in range(200_000)]
    assert any(o is keep[-1] for o in gc.get_objects())
    SetAside().after_step(EVERY_STEPS)
    assert len(gc.get_objects()) < 1000
    more = [[] for _ in range(1000)]
    assert len(gc.get_objects()) > 1000
    SetAside().after_step(EVERY_STEPS - 1)
    del keep, more
