"""Captured steps: equal to eager to the bit, for every bucket, length and kind of layer."""

import logging

import attrs
import numpy as np
import pytest
from ascend_steps import BLOCK, Config, Decoder, open_sim, step
from hypothesis import given, settings
from hypothesis import strategies as st

from halogen_ascend.padding import TrashBlock, pad, table_width
from halogen_ascend.sim.profiles import profiles


def prompts(decoder, lengths):
    """Prefill sequences of these lengths, each in blocks of its own; their tables."""
    tables = [[4 * i + j for j in range(4)] for i in range(len(lengths))]
    decoder.logits(
        step([([i + 1] * n, 0, t) for i, (n, t) in enumerate(zip(lengths, tables, strict=True))])
    )
    return tables


def decode(lengths, tables, **fields):
    return step([([7], n, t) for n, t in zip(lengths, tables, strict=True)], **fields)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_a_padded_replay_equals_the_eager_step_on_real_rows(backend, count):
    """Rows for padding must change nothing: the bit patterns of logits are compared."""
    decoder = Decoder(backend, blocks=40)
    lengths = [3 + 17 * i for i in range(count)]
    tables = prompts(decoder, lengths)
    batch = decode(lengths, tables, num_logprobs=5)
    eager = decoder.run(backend.upload_step(batch))
    replay = backend.capture(decoder.run, batch)
    got = replay(batch)
    for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"):
        a, b = (backend.download(getattr(s, name)) for s in (eager, got))
        assert a.shape[0] == count
        assert np.array_equal(a, b), name


def test_one_capture_serves_changing_lengths_tables_and_members(backend):
    decoder = Decoder(backend, Config(alternate_window=30), blocks=40)
    replays = {}
    lengths = [5, 120, 250]
    tables = prompts(decoder, lengths)
    for turn in range(12):
        alive = [0, 1, 2] if turn % 3 else [0, 2]  # one ends, one comes back
        batch = decode([lengths[i] for i in alive], [tables[i] for i in alive], num_logprobs=3)
        key = backend.capture_key(batch)
        if key not in replays:
            replays[key] = backend.capture(decoder.run, batch)
        eager = decoder.run(backend.upload_step(batch))
        got = replays[key](batch)
        assert np.array_equal(*(backend.download(s.top_logprobs) for s in (eager, got)))
        for i in alive:
            lengths[i] += 1
    assert len(replays) <= 3
    assert backend.counters().counters["graph_replays"] == 12


@pytest.mark.parametrize("name", sorted(profiles()))
def test_every_part_gives_the_same_graph_result(name):
    made = open_sim(name)
    decoder = Decoder(made, Config(layers=1, alternate_window=20), blocks=8)
    tables = prompts(decoder, [40, 7])
    batch = decode([40, 7], tables, num_logprobs=1)
    replay = made.capture(decoder.run, batch)
    eager = decoder.run(made.upload_step(batch))
    assert np.array_equal(*(made.download(s.logprobs) for s in (eager, replay(batch))))
    want = decoder.model.logits([1] * 40 + [7])[-1]
    got = decoder.logits(batch)[0]
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


def test_replay_is_one_launch_and_its_memory_is_counted(backend):
    decoder = Decoder(backend, blocks=8)
    tables = prompts(decoder, [9])
    batch = decode([9], tables)
    line, pool = backend.device.timeline, backend.device.hbm.pools["graph"]
    assert pool.used == 0
    replay = backend.capture(decoder.run, batch)
    assert pool.used > 0
    launches, allocations = line.launches, pool.allocations
    replay(batch)
    assert line.launches == launches + 1
    assert pool.allocations == allocations
    del replay
    assert pool.used == 0, "a dropped capture gives its memory back"


def test_sampling_parameters_follow_the_batch(backend):
    decoder = Decoder(backend, blocks=8)
    tables = prompts(decoder, [9, 9])
    cold = decode([9, 9], tables)
    replay = backend.capture(decoder.run, cold)
    hot = decode(
        [9, 9],
        tables,
        temperature=np.array([5, 0], np.float32),
        uniforms=np.array([0.99, 0.1], np.float32),
    )
    eager = decoder.tokens(hot)
    assert backend.download(replay(hot).token_ids).tolist() == eager.tolist()
    assert backend.download(replay(cold).token_ids).tolist() == decoder.tokens(cold).tolist()


def test_a_seeded_row_does_not_depend_on_its_neighbours(backend):
    decoder = Decoder(backend, blocks=16)
    tables = prompts(decoder, [20, 31, 12])
    mine = {"temperature": np.float32(1.3), "uniforms": np.float32(0.73), "top_p": np.float32(0.9)}
    alone = decoder.tokens(decode([20], tables[:1], **{k: np.array([v]) for k, v in mine.items()}))
    for other in (0.0, 2.0):
        fields = {
            "temperature": np.array([mine["temperature"], other, other], np.float32),
            "uniforms": np.array([mine["uniforms"], 0.1, 0.9], np.float32),
            "top_p": np.array([mine["top_p"], 0.3, 1.0], np.float32),
        }
        together = decoder.tokens(decode([20, 31, 12], tables, **fields))
        assert together[0] == alone[0]


def test_batches_beyond_the_buckets_run_eagerly_and_say_so(caplog):
    made = open_sim(graph_buckets="1,2")
    decoder = Decoder(made, blocks=16)
    tables = prompts(decoder, [4, 4, 4])
    with caplog.at_level(logging.WARNING):
        assert made.capture_key(decode([4, 4, 4], tables)) is None
        made.capture_key(decode([4, 4, 4], tables))
    assert [r.message for r in caplog.records if "no captured step holds 3" in r.message] == [
        caplog.records[0].message
    ]
    assert made.capture_key(decode([4], tables[:1])) is not None
    assert made.capture_key(step([([1, 2], 4, tables[0])])) is None, "not a decode step"


def test_tables_are_as_wide_as_the_longest_sequence_with_its_drafts(backend):
    """Drafts count: a graph made before them must not be too narrow after."""
    assert [table_width(n) for n in (1, 2, 3, 5, 64)] == [1, 2, 4, 8, 64]
    decoder = Decoder(backend, blocks=20)
    length = BLOCK * 2 - 1
    decoder.logits(step([([1] * length, 0, [0, 1])]))
    drafts = step([([2, 3, 4, 5], length, [0, 1, 2])], all_logits=True)
    assert decoder.logits(drafts).shape == (4, 97)
    narrow = attrs.evolve(drafts, block_tables=drafts.block_tables[:, :2])
    with pytest.raises(Exception, match="room for 2 blocks in its table; 3 are needed"):
        decoder.logits(narrow)


@given(st.integers(1, 8), st.integers(0, 8))
@settings(max_examples=30, deadline=None)
def test_padding_keeps_every_list_in_step(count, extra):
    batch = step([([1], i, [i]) for i in range(count)], num_logprobs=2)
    padded = pad(batch, count + extra, TrashBlock(block=99, size=BLOCK))
    size = count + extra
    assert padded.num_sequences == padded.num_tokens == len(padded.logit_rows) == size
    assert len(padded.block_tables) == len(padded.query_start_loc) - 1 == size
    assert (np.diff(padded.query_start_loc) >= 0).all()
    assert (padded.slot_mapping[count:] // BLOCK == 99).all()
    assert padded.sampling.num_rows == size
    assert len(padded.sampling.history_start) == size + 1
