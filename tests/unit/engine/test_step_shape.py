"""What a step is told to cost: its shape, counted one token at a time, and a model that learns it."""

import random
from types import SimpleNamespace

from halogen_core.engine.batch import step_shape
from halogen_core.spi import StepShape
from halogen_core.spi.costs import LinearCost


def test_shapes_count_what_every_token_attends_to():
    rng = random.Random(1)
    for _ in range(50):
        items = []
        for _ in range(rng.randrange(1, 6)):
            start, count = rng.choice([0, rng.randrange(1, 500)]), rng.choice([1, 1, 40])
            items.append(SimpleNamespace(start=start, count=count, end=start + count))
        shape = step_shape(items)
        prompts = [i for i in items if i.count > 1 or i.start == 0]
        assert shape.decode_sequences == len(items) - len(prompts)
        assert shape.prefill_tokens == sum(i.count for i in prompts)
        assert shape.kv_tokens == sum(i.end for i in items)
        assert shape.prefill_pairs == sum(p + 1 for i in prompts for p in range(i.start, i.end))


def test_a_chunk_late_in_a_prompt_is_predicted_to_take_longer():
    """Two chunks that read the same number of KV tokens; one attends to all of them."""
    model, rng = LinearCost(), random.Random(2)
    for _ in range(200):
        count, context = rng.randrange(1, 256), rng.randrange(4000)
        others = rng.randrange(4000)
        model.observe(shape_of(count, context, others), 1e-3 * count + 1e-6 * count * context)
    early, late = (model.predict(shape_of(256, c, 4000 - c)).p50 for c in (0, 4000))
    assert 0.9 < early / 0.256 < 1.1
    assert 0.9 < late / (0.256 + 1e-6 * 256 * 4000) < 1.1


def test_a_kind_of_step_that_was_never_seen_is_not_said_to_take_no_time():
    """After prompts whose time is all in their tokens, a step of answers alone is unknown."""
    model, rng = LinearCost(), random.Random(3)
    for _ in range(40):
        count = rng.randrange(16, 256)
        seconds = 1e-3 * count * (1 - 1e-4 * count)  # bends down: no constant fits
        prompt = StepShape(prefill_tokens=count, decode_sequences=0, kv_tokens=0, prefill_pairs=0)
        model.observe(prompt, seconds - 2e-3)
    assert model.predict(prompt).p50 > 0
    answers = StepShape(prefill_tokens=0, decode_sequences=4, kv_tokens=0)
    predicted = model.predict(answers)
    assert predicted is None or predicted.p50 > 0


def shape_of(count, context, others):
    return StepShape(
        prefill_tokens=count,
        decode_sequences=1,
        kv_tokens=context + count + others,
        prefill_pairs=count * context + count * (count + 1) // 2,
    )
