"""What a captured step does, without a GPU: static inputs and padding on the interpreter.

The graph itself is a device matter (`benchmarks/gpu`); everything that feeds it is not.
"""

import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from halogen_core.engine.batch import build_step
from halogen_core.engine.protocol import SamplingParams
from halogen_core.engine.sampler import RowSampler
from halogen_core.spi import Carried
from halogen_triton import capture

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_backend import MODELS, item, open_runner, triton_backend


def decoding(runner, *, rows, params=None):
    """Prefill `rows` sequences, then the batch that decodes one token of each."""
    rng = np.random.default_rng(5)
    sampler = RowSampler.start(params or SamplingParams(), [], seed=3)
    steps = []
    tokens = [rng.integers(0, 128, 20).tolist() for _ in range(rows)]
    for start, count in ((0, 19), (19, 1)):
        items = [item(tokens[r], start, count, [2 * r, 2 * r + 1]) for r in range(rows)]
        for one in items:
            object.__setattr__(one, "sampler", sampler)
        steps.append(build_step(items, 16).batch)
    runner.logits(steps[0])
    return steps[1]


SAMPLED = SamplingParams(temperature=0.8, top_p=0.9)


@pytest.mark.parametrize(
    "params", [SamplingParams(), pytest.param(SAMPLED, marks=pytest.mark.slow)]
)
def test_padded_static_inputs_give_the_eager_tokens(params):
    runner = open_runner(triton_backend(), MODELS["qwen2 f32"])
    batch = decoding(runner, rows=3, params=params)
    key = capture.capture_key(batch, 256)
    assert (key.rows, key.samples, key.flash) == (4, params.temperature > 0, False)
    backend = runner.backend
    inputs = capture.StaticInputs(key, *backend._trash, backend.device)
    inputs.fill(batch)
    meta = capture.static_meta(backend.upload_step, inputs)
    before = runner.kv.payload.data[:, :-1].clone()
    padded = runner._forward(meta).token_ids
    eager = runner._forward(backend.upload_step(batch)).token_ids
    assert padded[:3].tolist() == eager.tolist()
    after = runner.kv.payload.data[:, :-1]
    changed = (before != after).flatten(2).any(-1).any(0)
    assert set(changed.nonzero().flatten().tolist()) <= {1, 3, 5}, "padding wrote outside trash"
    # tokens that only the device knows yet give the same
    known = torch.from_numpy(batch.token_ids[::-1].copy()).to(backend.device)
    carried = Carried(rows=np.array([2, 1, 0], np.int32), tokens=known)
    unknown = np.full(3, -1, np.int32)
    inputs.fill(attrs.evolve(batch, token_ids=unknown, carried=carried))
    assert runner._forward(meta).token_ids[:3].tolist() == eager.tolist()
    # a second batch through the same buffers leaves nothing of the first behind
    inputs.fill(decoding(runner, rows=4, params=params))
    inputs.fill(batch)
    assert runner._forward(meta).token_ids[:3].tolist() == eager.tolist()


@pytest.mark.parametrize(
    ("cached", "count"), [(0, 9), (5, 32), pytest.param(16, 31, marks=pytest.mark.slow)]
)
def test_a_padded_prompt_gives_the_eager_token(cached, count):
    runner = open_runner(triton_backend(), MODELS["qwen2 f32"])
    tokens = np.random.default_rng(count).integers(0, 128, cached + count).tolist()
    table = [7, 2, 4]
    if cached:
        runner.logits(build_step([item(tokens, 0, cached, table)], 16).batch)
    batch = build_step([item(tokens, cached, count, table)], 16).batch
    key = capture.capture_key(batch, 256)
    assert (key.rows, key.prompt) == (2, 64 if count == 31 else 32)
    inputs = capture.StaticInputs(key, *runner.backend._trash, runner.backend.device)
    # launches are those of another prompt of the same bucket
    inputs.fill(build_step([item(tokens[: cached + 2], cached, 2, table)], 16).batch)
    meta = capture.static_meta(runner.backend.upload_step, inputs)
    inputs.fill(batch)
    eager = runner._forward(runner.backend.upload_step(batch)).token_ids
    written = runner.kv.payload.data[:, :-1].clone()
    assert runner._forward(meta).token_ids.tolist() == eager.tolist()
    after = runner.kv.payload.data[:, :-1]
    outside = [block for block in range(after.shape[1]) if block not in table]
    assert (after[:, outside] == written[:, outside]).all(), "padding wrote outside trash"
    assert torch.allclose(after, written, atol=1e-5)


def test_only_short_prompts_have_a_bucket():
    buckets = {n: capture._prompt_bucket(n) for n in (2, 30, 31, 32, 33, 1022, 1023, 1024, 1025)}
    assert buckets == {
        2: 32,
        30: 32,
        31: 64,
        32: 32,
        33: 64,
        1022: 1024,
        1023: 0,
        1024: 1024,
        1025: 0,
    }


@pytest.mark.slow
def test_grammars_stay_in_the_captured_step():
    runner = open_runner(triton_backend(), MODELS["qwen2 f32"])
    batch = decoding(runner, rows=3)
    allowed = np.random.default_rng(2).integers(0, 2, (3, 128)).astype(bool)
    mask = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    batch = attrs.evolve(batch, sampling=attrs.evolve(batch.sampling, mask=mask))
    key = capture.capture_key(batch, 256)
    assert (key.rows, key.mask_words, key.samples) == (4, 4, False)
    inputs = capture.StaticInputs(key, *runner.backend._trash, runner.backend.device)
    inputs.fill(batch)
    meta = capture.static_meta(runner.backend.upload_step, inputs)
    expected = np.where(allowed, runner.logits(batch), -np.inf).argmax(1)
    assert runner._forward(meta).token_ids[:3].tolist() == expected.tolist()


def test_only_plain_decode_steps_are_captured():
    runner = open_runner(triton_backend(), MODELS["qwen2 f32"])
    batch = decoding(runner, rows=2)
    assert capture.capture_key(batch, 256) == capture.CaptureKey(
        rows=2, table_width=32, samples=False, flash=False
    )
    assert capture.capture_key(batch, 4).flash
    penalised = decoding(runner, rows=2, params=SamplingParams(repetition_penalty=1.2))
    object.__setattr__(penalised.sampling, "history_ids", np.array([1], np.int32))
    assert capture.capture_key(penalised, 256) is None
    two = [item(list(range(9)), 0, 9, [0]), item(list(range(9)), 0, 9, [1])]
    assert capture.capture_key(build_step(two, 16).batch, 256) is None
    on_gpu = runner.backend.device.type != "cpu"
    assert (runner.backend.capture_key(batch) is not None) is on_gpu, "no graphs on a CPU"
