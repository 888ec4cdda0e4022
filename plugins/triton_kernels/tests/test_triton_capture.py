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


def step_of(n, *, count=1, context=40, sampled=False, masked=False, carried=False, seed=0):
    """A step of `n` sequences with `count` tokens each; every number in it is random."""
    rng = np.random.default_rng(seed)
    params = SAMPLED if sampled else SamplingParams()
    sampler = RowSampler.start(params, [], seed=seed)
    items = []
    for _ in range(n):
        start = int(rng.integers(1, context - count))
        table = rng.integers(1, 90, -(-(start + count) // 16)).tolist()
        items.append(item(rng.integers(1, 128, start + count).tolist(), start, count, table))
        object.__setattr__(items[-1], "sampler", sampler)
    batch = build_step(items, 16).batch
    if masked:
        mask = rng.integers(0, 1 << 32, (n, 4), dtype=np.uint32)
        batch = attrs.evolve(batch, sampling=attrs.evolve(batch.sampling, mask=mask))
    if carried:
        tokens = torch.from_numpy(rng.integers(1, 128, n).astype(np.int32))
        rows = rng.permutation(n).astype(np.int32)
        batch = attrs.evolve(batch, carried=Carried(rows=rows, tokens=tokens))
    return batch


def padded(values, size, fill):
    out = np.full((size, *values.shape[1:]), fill, values.dtype)
    out[: len(values)] = values
    return out


def expected(key, batch, trash_slot):
    """What a bucket's inputs must hold: the batch, and padding that lives in the trash block."""
    n, spare = batch.num_sequences, key.tokens - batch.num_tokens
    tables = np.zeros((key.rows, key.table_width), np.int32)
    tables[:n, : batch.block_tables.shape[1]] = batch.block_tables
    tables[n:] = trash_slot // 16
    if key.prompt:
        starts, lens = np.append(batch.query_start_loc, key.prompt), [max(1, spare)]
        logit_rows = batch.logit_rows
    else:
        starts = np.arange(key.rows + 1)
        lens = [1] * (key.rows - n)
        logit_rows = np.append(batch.logit_rows, np.arange(n, key.rows))
    found = {
        "token_ids": padded(batch.token_ids, key.tokens, 0),
        "positions": padded(batch.positions, key.tokens, 0),
        "slot_mapping": padded(batch.slot_mapping, key.tokens, trash_slot),
        "query_start_loc": starts,
        "seq_lens": np.append(batch.seq_lens, lens),
        "block_tables": tables,
        "logit_rows": logit_rows,
    }
    none = np.zeros(0, np.int32)
    rows = none if batch.carried is None else batch.carried.rows
    found["carried"] = padded(rows, key.tokens, -1)
    if key.samples:
        for name in capture.FIELDS:
            found[name] = padded(getattr(batch.sampling, name), key.picks, 0)
    if key.mask_words:
        found["mask"] = padded(batch.sampling.mask.view(np.int32), key.picks, -1)
    return found


def readable(tables, seq_lens):
    """Blocks that attention reads; what lies behind them in a row is nobody's."""
    blocks = -(-np.asarray(seq_lens) // 16)
    return np.where(np.arange(tables.shape[1]) < blocks[:, None], tables, 0)


def check_filled(inputs, key, batch, trash_slot):
    inputs.fill(batch)
    wanted = expected(key, batch, trash_slot)
    got = {name: tensor.cpu().numpy() for name, tensor in inputs.device.items()}
    assert wanted.keys() == got.keys()
    if batch.carried is not None:  # known to the device alone
        told = batch.carried.tokens.numpy()[batch.carried.rows]
        wanted["token_ids"] = padded(told, key.tokens, 0)
    for side in (got, wanted):
        side["block_tables"] = readable(side["block_tables"], wanted["seq_lens"])
    for name, values in wanted.items():
        assert (got[name] == values).all(), name


VARIANTS = [{}, {"sampled": True}, {"masked": True}, {"sampled": True, "masked": True}]


@pytest.mark.parametrize("rows", capture.BUCKETS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_bucket_holds_the_step_and_inert_padding(rows, variant):
    """In place: after a full step with longer contexts nothing of that is left behind."""
    trash_slot = 99 * 16
    fewest = max((b for b in capture.BUCKETS if b < rows), default=0) + 1
    full = step_of(rows, context=500, seed=1, **variant)
    key = capture.capture_key(full, 256)
    assert key.rows == rows
    few = step_of(fewest, seed=2, **variant)
    check_filled(
        capture.StaticInputs(key, trash_slot, 16, torch.device("cpu")), key, few, trash_slot
    )
    inputs = capture.StaticInputs(key, trash_slot, 16, torch.device("cpu"))
    check_filled(inputs, key, full, trash_slot)
    for n in {fewest, rows}:
        for carried in (True, False):
            batch = step_of(n, context=40, seed=n, carried=carried, **variant)
            assert capture.capture_key(batch, 1000).rows == rows
            check_filled(inputs, key, batch, trash_slot)
    for name, tensor in inputs.device.items():
        assert tensor.data_ptr() % 16 == 0, f"kernels were compiled for aligned `{name}`"


@pytest.mark.parametrize("prompt", capture.PROMPTS)
def test_every_prompt_bucket_holds_the_prompt_and_inert_padding(prompt):
    trash_slot = 99 * 16
    shorter = max((p for p in capture.PROMPTS if p < prompt), default=1)
    full = step_of(1, count=prompt, context=1500, seed=1)
    key = capture.capture_key(full, 256)
    assert (key.rows, key.prompt) == (2, prompt)
    inputs = capture.StaticInputs(key, trash_slot, 16, torch.device("cpu"))
    for count in (prompt, prompt - 2, max(2, shorter - 1), prompt):
        batch = step_of(1, count=count, context=count + 30, seed=count)
        assert capture.capture_key(batch, 256).prompt == prompt
        check_filled(inputs, key, batch, trash_slot)
        # launches are those of the whole bucket, however much of it is padding
        assert inputs.batch().query_start_loc.tolist() == [0, prompt - 2, prompt]


def test_the_flash_path_is_another_bucket_from_one_token_over_the_threshold():
    batch = step_of(2)
    longest = batch.max_seq_len
    assert not capture.capture_key(batch, longest).flash
    assert capture.capture_key(batch, longest - 1).flash


def test_a_replay_fills_launches_once_and_gives_the_steps_own_rows():
    class Graph:
        """What torch records on a GPU: here it only picks what it reads."""

        def replay(self):
            launched.append(inputs.device["token_ids"].tolist())
            picks.copy_(inputs.device["token_ids"] + 1)

    launched, counted, batch = [], [], step_of(3)
    key = capture.capture_key(batch, 256)
    inputs = capture.StaticInputs(key, 99 * 16, 16, torch.device("cpu"))
    picks = torch.zeros(key.rows, dtype=torch.int32)
    replay = capture.GraphReplay(inputs, Graph(), picks, lambda: counted.append(1))
    for step in (batch, step_of(4, seed=5)):
        assert replay(step).token_ids.tolist() == (step.token_ids + 1).tolist()
    assert (len(launched), len(counted)) == (2, 2)
