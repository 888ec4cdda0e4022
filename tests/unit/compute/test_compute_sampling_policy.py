"""What the core asks of `sample`: numbers, penalties' histories, minimum lengths."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halogen_core.engine.protocol import SamplingParams
from halogen_core.engine.sampler import RowSampler, SamplingRow, sampling_batch, uniforms


def u64(*values):
    return np.array(values, np.uint64)


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=9)
)
def test_a_number_depends_on_seed_and_position_alone(pairs):
    seeds, positions = u64(*(s for s, _ in pairs)), u64(*(p for _, p in pairs))
    together = uniforms(seeds, positions)
    assert ((together >= 0) & (together < 1)).all()
    for row, (seed, position) in enumerate(pairs):
        assert uniforms(u64(seed), u64(position))[0] == together[row]


@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_numbers_are_uniform_and_uncorrelated(axis):
    """Chi-square over 64 bins along positions of one seed, and along neighbouring seeds."""
    count = 64_000
    line, fixed = np.arange(count, dtype=np.uint64), np.full(count, 5, np.uint64)
    numbers = uniforms(fixed, line) if axis == "positions" else uniforms(line, fixed)
    seen = np.bincount((numbers * 64).astype(int), minlength=64)
    assert ((seen - 1000) ** 2 / 1000).sum() < 104  # 63 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.013


def start(prompt=(1, 2, 2, 3), **fields):
    extra = {
        k: fields.pop(k) for k in ("end_token_ids", "min_tokens", "num_logprobs") if k in fields
    }
    return RowSampler.start(SamplingParams(**fields), list(prompt), seed=7, **extra)


@given(st.lists(st.integers(0, 40), max_size=300), st.lists(st.integers(0, 40), max_size=30))
def test_history_equals_a_recount(generated, prompt):
    sampler = start(prompt, presence_penalty=0.5)
    for token in generated:
        sampler.record(token)
    batch = sampling_batch(
        [SamplingRow(start(), 9), SamplingRow(sampler, 9), SamplingRow(start(), 9)]
    )
    counts, n = Counter(generated), len(set(generated) | set(prompt))
    assert batch.history_start.tolist() == [0, 0, n, n]
    found = dict(zip(batch.history_ids.tolist(), batch.history_counts.tolist(), strict=True))
    assert found == {token: counts[token] for token in set(generated) | set(prompt)}


def test_rows_without_penalties_carry_no_history():
    batch = sampling_batch([SamplingRow(start(temperature=1.0), 4)])
    assert batch.history_ids.size == 0
    assert batch.all_greedy is False


def test_end_tokens_wait_for_the_minimum():
    sampler = start(end_token_ids=[7, 9], min_tokens=2, logit_bias={7: 3.0, 4: 1.0})
    for expected in (
        {7: -np.inf, 9: -np.inf, 4: 1.0},
        {7: -np.inf, 9: -np.inf, 4: 1.0},
        {7: 3.0, 4: 1.0},
    ):
        batch = sampling_batch([SamplingRow(sampler, 4)])
        found = dict(zip(batch.bias_ids.tolist(), batch.bias_values.tolist(), strict=True))
        assert found == expected
        sampler.record(1)


def test_forced_rows_are_neutral():
    sampler = start(
        temperature=1.0, top_k=3, presence_penalty=1.0, logit_bias={2: 5.0}, num_logprobs=2
    )
    batch = sampling_batch([SamplingRow(sampler, 3, forced=17), SamplingRow(sampler, 4)])
    assert batch.forced.tolist() == [17, -1]
    assert batch.temperature.tolist() == [0, 1]
    assert batch.top_k.tolist() == [0, 3]
    assert batch.history_start.tolist() == [0, 0, 3]
    assert batch.bias_start.tolist() == [0, 0, 1]
    assert batch.num_logprobs == 2


def test_no_rows():
    batch = sampling_batch([])
    assert batch.num_rows == 0
    assert batch.history_start.tolist() == [0]


def test_the_seed_of_the_request_wins():
    one, two = start(seed=3, temperature=1.0), start(seed=3, temperature=1.0)
    other = start(temperature=1.0)
    numbers = [sampling_batch([SamplingRow(s, 5)]).uniforms[0] for s in (one, two, other)]
    assert numbers[0] == numbers[1] != numbers[2]
