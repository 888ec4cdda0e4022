"""`Ops.sample` against a naive row-by-row reference, and as a distribution."""

import attrs
import compute_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halogen_core.spi import TorchBackend
from halogen_core.spi.testing import OpaqueBackend, Share, greedy_sampling, step_batch
from halogen_core.torch_backend.truncation import _filter, truncate

BACKEND = TorchBackend()


def sample(logits, batch, backend=BACKEND):
    share = Share(tokens=(0,) * len(logits), blocks=(0,) * len(logits), all_logits=True)
    meta = backend.upload_step(step_batch([share], 16, sampling=batch))
    found = backend.ops.sample(backend.upload(logits), meta)
    return attrs.evolve(
        found,
        **{
            f.name: backend.download(getattr(found, f.name))
            for f in attrs.fields(type(found))
            if getattr(found, f.name) is not None
        },
    )


def csr(tables):
    start = np.cumsum([0, *map(len, tables)]).astype(np.int32)
    ids = np.array([k for t in tables for k in t], np.int32)
    return start, ids, [v for t in tables for v in t.values()]


@st.composite
def batches(draw):
    rows, vocab = draw(st.integers(1, 5)), draw(st.sampled_from([7, 40, 1500]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    pick = rng.choice
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * draw(st.sampled_from([0.3, 3]))
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    history = [
        {int(k): int(rng.integers(0, 4)) for k in pick(vocab, rng.integers(0, 6), replace=False)}
        for _ in range(rows)
    ]
    bias = [
        {int(k): float(rng.normal() * 5) for k in pick(vocab, rng.integers(0, 4), replace=False)}
        for _ in range(rows)
    ]
    mask = None
    if draw(st.booleans()):
        mask = rng.integers(0, 2**32, (rows, -(-vocab // 32)), dtype=np.uint32)
        mask[:, 0] |= 1
    h, b = csr(history), csr(bias)
    batch = greedy_sampling(
        rows,
        temperature=pick([0, 0.7, 1, 2.5], rows).astype(np.float32),
        top_k=pick([0, 1, 3, vocab, 2000], rows).astype(np.int32),
        top_p=pick([1, 0.95, 0.5, 0.01], rows).astype(np.float32),
        min_p=pick([0, 0.05, 0.6], rows).astype(np.float32),
        repetition_penalty=pick([1, 1.3, 0.8], rows).astype(np.float32),
        presence_penalty=pick([0, 0.5], rows).astype(np.float32),
        frequency_penalty=pick([0, 0.4], rows).astype(np.float32),
        uniforms=rng.random(rows, dtype=np.float32),
        history_start=h[0],
        history_ids=h[1],
        history_counts=np.array(h[2], np.int32),
        bias_start=b[0],
        bias_ids=b[1],
        bias_values=np.array(b[2], np.float32),
        mask=mask,
    )
    return logits, batch


@given(batches())
@settings(max_examples=150, deadline=None)
def test_equals_the_naive_reference(case):
    logits, batch = case
    got = sample(logits, batch).token_ids
    for row, token in enumerate(got.tolist()):
        assert token in oracle.picks(logits[row], batch, row)
    assert got.dtype == np.int32


def test_a_flat_distribution_needs_more_than_the_first_candidates():
    """3,000 tokens of nearly equal mass: top-p 0.9 keeps about 2,700 of them."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(3, 3000)) * 0.01).astype(np.float32)
    batch = greedy_sampling(
        3,
        temperature=np.ones(3, np.float32),
        top_p=np.array([0.9, 0.5, 0.2], np.float32),
        uniforms=np.array([0.999, 0.5, 0.1], np.float32),
    )
    want = [oracle.pick(logits[row], batch, row) for row in range(3)]
    assert sample(logits, batch).token_ids.tolist() == want


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(6, 500)).astype(np.float32) * 3
    fields = {
        "temperature": np.array([0, 1, 0.5, 2, 0, 1], np.float32),
        "top_k": np.array([0, 5, 0, 100, 0, 0], np.int32),
        "top_p": np.array([1, 0.9, 0.3, 1, 1, 1], np.float32),
        "uniforms": rng.random(6, dtype=np.float32),
    }
    together = sample(logits, greedy_sampling(6, **fields, num_logprobs=3))
    for row in range(6):
        own = {k: v[row : row + 1] for k, v in fields.items()}
        alone = sample(logits[row : row + 1], greedy_sampling(1, **own, num_logprobs=3))
        assert alone.token_ids[0] == together.token_ids[row]
        np.testing.assert_array_equal(alone.logprobs[0], together.logprobs[row])
        np.testing.assert_array_equal(alone.top_ids[0], together.top_ids[row])


def test_distribution_by_chi_square():
    """20,000 draws by stratified numbers fall as softmax says."""
    logits = np.array([[0.0, 1.0, 2.0, -1.0, 0.5]], np.float32)
    draws = 20_000
    rng = np.random.default_rng(2)
    batch = greedy_sampling(
        draws,
        temperature=np.full(draws, 0.8, np.float32),
        uniforms=rng.random(draws, dtype=np.float32),
    )
    ids = sample(np.repeat(logits, draws, axis=0), batch).token_ids
    p = np.exp(logits[0] / 0.8)
    expected = draws * p / p.sum()
    seen = np.bincount(ids, minlength=5)
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < 18.5  # 4 degrees of freedom, p = 0.001


def test_logprobs_are_of_the_model_and_ordered_by_id_among_equals():
    logits = np.array([[1, 5, 5, 2, 5, 0], [0, 0, 0, 0, 0, 0]], np.float32)
    batch = greedy_sampling(
        2, temperature=np.array([0, 1], np.float32), uniforms=np.array([0, 0.99], np.float32),
        bias_start=np.array([0, 1, 1], np.int32), bias_ids=np.array([3], np.int32),
        bias_values=np.array([100], np.float32), num_logprobs=4,
    )  # fmt: skip
    got = sample(logits, batch)
    truth = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    assert got.token_ids.tolist() == [3, 5]
    assert got.top_ids.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]
    np.testing.assert_allclose(got.logprobs, [truth[0, 3], truth[1, 5]], rtol=1e-6)
    np.testing.assert_allclose(got.top_logprobs[0], truth[0, [1, 2, 4, 3]], rtol=1e-6)
    assert sample(logits, attrs.evolve(batch, num_logprobs=0)).top_ids is None
    assert sample(logits, attrs.evolve(batch, num_logprobs=-1)).logprobs is None


def test_forced_tokens_are_reported():
    logits = np.array([[1, 2, 3], [3, 2, 1]], np.float32)
    got = sample(logits, greedy_sampling(2, forced=np.array([0, -1], np.int32), num_logprobs=0))
    assert got.token_ids.tolist() == [0, 0]
    assert got.logprobs[0] < got.logprobs[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_that_are_not_finite_give_no_token(bad, temperature):
    logits = np.zeros((3, 8), np.float32)
    logits[1, 2] = bad
    batch = greedy_sampling(3, temperature=np.full(3, temperature, np.float32), num_logprobs=0)
    got = sample(logits, batch).token_ids
    assert got.tolist() == [0, -1, 0]


def test_a_fully_masked_row_gives_no_token():
    mask = np.array([[0], [4]], np.uint32)
    assert sample(
        np.zeros((2, 5), np.float32), greedy_sampling(2, mask=mask)
    ).token_ids.tolist() == [-1, 2]


@pytest.mark.parametrize("spread", [0.01, 1, 6])
def test_the_ways_to_truncate_agree(spread):
    """What a device does (sort everything) and what a CPU does (look only where it matters)."""
    rng = np.random.default_rng(7)
    logits = torch.from_numpy((rng.normal(size=(8, 3000)) * spread).astype(np.float32))
    probabilities = logits.round(decimals=2).softmax(-1)
    top_k = torch.tensor([0, 5, 0, 700, 2999, 0, 1, 256], dtype=torch.int32)
    top_p = torch.tensor([1, 0.9, 0.9, 0.5, 1, 0.3, 0.1, 0.999])
    ks = torch.where(top_k == 0, 3000, top_k).long()
    everything = probabilities.sort(dim=-1, descending=True).values
    want = _filter(probabilities.clone(), everything, ks, top_p)
    assert torch.equal(truncate(probabilities.clone(), top_k, top_p), want)
    assert torch.equal(want[0], probabilities[0])


def test_no_rows():
    assert sample(
        np.zeros((0, 8), np.float32), greedy_sampling(0, num_logprobs=2)
    ).token_ids.shape == (0,)


def test_through_the_host():
    logits = np.random.default_rng(4).normal(size=(2, 30)).astype(np.float32)
    batch = greedy_sampling(
        2, temperature=np.ones(2, np.float32), uniforms=np.array([0.3, 0.8], np.float32),
        num_logprobs=2,
    )  # fmt: skip
    own, opaque = sample(logits, batch), sample(logits, batch, OpaqueBackend())
    for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(own, name), getattr(opaque, name))
