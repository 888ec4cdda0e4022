"""Sampling in the interpreter against a float64 oracle that sorts."""

import os

import numpy as np
import pytest
import torch

from halogen_triton.sampling import DrawTensors, draw

DEVICE = os.environ.get("HALOGEN_TEST_DEVICE", "cpu")


def oracle(logits, temperature, top_k, top_p, min_p, uniform):
    if temperature == 0:
        return int(np.argmax(logits))
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    order = np.lexsort((np.arange(len(p)), -logits))
    keep = np.zeros(len(p), bool)
    kept = order[: top_k or len(p)]
    before = np.concatenate([[0], np.cumsum(p[kept])[:-1]])
    if top_p < 1:
        kept = kept[before < top_p * p[kept].sum()]
    keep[kept] = True
    keep &= p >= min_p * p.max()
    running = np.cumsum(np.where(keep, p, 0))
    return int(np.searchsorted(running, uniform * running[-1], side="right"))


def pick(logits, mask=None, **fields):
    rows = len(logits)
    kinds = {"top_k": torch.int32}
    given = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniforms": 0.5, **fields
    }  # fmt: skip
    tensors = {
        name: torch.as_tensor(value, dtype=kinds.get(name, torch.float32))
        .expand(rows)
        .contiguous()
        .to(DEVICE)
        for name, value in given.items()
    }
    bits = None if mask is None else packed(mask)
    return draw(torch.from_numpy(logits).to(DEVICE), DrawTensors(tensors, bits)).tolist(), tensors


def packed(mask):
    """Allowed tokens [R, V] as words of 32 bits."""
    padded = np.pad(mask, ((0, 0), (0, -mask.shape[1] % 32)))
    words = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(words).to(DEVICE)


def agrees(logits, mask=None, **fields):
    got, given = pick(logits, mask, **fields)
    for r, row in enumerate(logits if mask is None else np.where(mask, logits, -np.inf)):
        want = oracle(row, *(given[name][r].item() for name in given))
        assert got[r] == want, (r, fields)


LOGITS = np.random.default_rng(1).normal(size=(4, 300)).astype(np.float32) * 3


def test_greedy_takes_the_lowest_of_equals():
    logits = np.zeros((2, 450), np.float32)
    logits[1, [400, 17, 300]] = 2.5
    assert draw(torch.from_numpy(logits).to(DEVICE), DrawTensors()).tolist() == [0, 17]
    assert pick(logits, temperature=0.0)[0] == [0, 17]


@pytest.mark.parametrize("uniform", [0.0, 0.77])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 5000},
        {"top_p": 0.5},
        {"top_p": 0.95, "top_k": 20},
        {"min_p": 0.2},
        {"min_p": 0.05, "top_p": 0.9, "top_k": 40, "temperature": 1.7},
    ],
    ids=str,
)
def test_truncations(fields, uniform):
    agrees(LOGITS, uniforms=uniform, **fields)


def test_rows_keep_their_own_parameters():
    agrees(
        LOGITS,
        temperature=[0.0, 1.0, 0.5, 2.0],
        top_k=[0, 3, 0, 50],
        top_p=[1.0, 1.0, 0.7, 0.9],
        min_p=[0.0, 0.0, 0.1, 0.0],
        uniforms=[0.1, 0.6, 0.9, 0.4],
    )


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("top_p", [0.3, 0.6, 1.0])
def test_equal_logits_are_cut_from_the_highest_id(top_k, top_p):
    logits = np.full((1, 300), -4.0, np.float32)
    logits[0, [3, 50, 260, 299]] = 1.0
    for uniform in (0.1, 0.5, 0.9):
        agrees(logits, top_k=top_k, top_p=top_p, uniforms=uniform)


def test_impossible_tokens_are_never_drawn():
    logits = np.full((1, 300), -np.inf, np.float32)
    logits[0, [7, 9]] = 0.0
    for uniform in (0.0, 0.49, 0.51, 0.9999999):
        agrees(logits, uniforms=uniform)


LONG = np.random.default_rng(2).normal(size=(2, 3500)).astype(np.float32) * 2
TRUNCATIONS = [
    {},
    {"top_k": 30, "top_p": 0.8},
    {"top_p": 0.6},
    # more than a block of candidates, and more than eight: the row itself is gone over
    {"top_k": 700},
    {"top_k": 2500, "top_p": 0.99, "temperature": 3.0},
    {"top_p": 0.9999, "temperature": 3.0},
    {"min_p": 0.01},
]


@pytest.mark.parametrize("fields", TRUNCATIONS, ids=str)
def test_rows_of_many_blocks(fields):
    agrees(LONG, uniforms=[0.31, 0.94], **fields)


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, *TRUNCATIONS[:4]], ids=str)
def test_masks_come_before_truncations(fields):
    mask = np.random.default_rng(3).random(LONG.shape) < 0.2
    mask[1] = False
    mask[1, [5, 1333, 3499]] = True
    agrees(LONG, mask, uniforms=[0.31, 0.94], **fields)


def test_rows_that_are_not_finite_give_no_token():
    logits = LONG[:, :300].copy()
    logits[0, 200] = np.nan
    mask = np.ones(logits.shape, bool)
    mask[1] = False
    for temperature in (0.0, 0.8):
        assert pick(logits, mask, temperature=temperature, top_k=4)[0] == [-1, -1]
    assert draw(torch.from_numpy(logits).to(DEVICE), DrawTensors()).tolist()[0] == -1


def test_counters_are_left_at_zero():
    joins = torch.zeros(1 << 12, dtype=torch.int32, device=DEVICE)
    fields = {
        name: torch.full((2,), value, device=DEVICE)
        for name, value in {
            "temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.0, "uniforms": 0.4
        }.items()
    }  # fmt: skip
    fields["top_k"] = fields["top_k"].int()
    logits = torch.from_numpy(LONG).to(DEVICE)
    first = draw(logits, DrawTensors(fields), joins=joins)
    assert not joins.any()
    assert torch.equal(first, draw(logits, DrawTensors(fields), joins=joins))
