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


def pick(logits, **fields):
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
    return draw(torch.from_numpy(logits).to(DEVICE), DrawTensors(tensors)).tolist(), tensors


def agrees(logits, **fields):
    got, given = pick(logits, **fields)
    for r, row in enumerate(logits):
        want = oracle(row, *(given[name][r].item() for name in given))
        assert got[r] == want, (r, fields)


LOGITS = np.random.default_rng(1).normal(size=(4, 300)).astype(np.float32) * 3


def test_greedy_takes_the_lowest_of_equals():
    logits = np.zeros((2, 450), np.float32)
    logits[1, [400, 17, 300]] = 2.5
    assert draw(torch.from_numpy(logits).to(DEVICE), None).tolist() == [0, 17]
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
