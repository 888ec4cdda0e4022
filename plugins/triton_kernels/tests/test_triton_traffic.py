"""Bytes that kernels ask for, counted while the interpreter executes them: what streams is read once.

Weights and KV are what a decode step waits for. Their bytes asked for by the programs of a launch
are at most 1.1 times what is there; what one program asks for again is in its first-level cache,
and masked elements are not asked for.
"""

import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from halogen_triton import interpreter
from halogen_triton.attention import attention
from halogen_triton.int8 import Int8
from halogen_triton.linear import linear
from halogen_triton.planes import Planes

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_attention import GROUPED, Problem, heads, plan
from test_triton_formats import TINY as FORMATS
from test_triton_linear import TINY, normal, planes

MOST = 1.1
RULES = {**TINY.rules, **FORMATS.rules}
TABLE = attrs.evolve(TINY, rules=RULES)
pytestmark = pytest.mark.skipif(
    not interpreter.active() or os.environ.get("HALOGEN_TEST_DEVICE", "cpu") != "cpu",
    reason="counts what the interpreter loads",
)


@pytest.fixture
def asked(monkeypatch):
    """Counts bytes asked for, by name of the tensors that it is given after a launch."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    load, taken, widths = Builder.create_masked_load, defaultdict(list), {}

    def recorded(self, pointers, mask, *rest, **named):
        addresses = pointers.data[mask.data.astype(bool)]
        taken[tuple(self.grid_idx)].append(addresses)
        width = pointers.get_element_ty().primitive_bitwidth // 8
        widths.update(dict.fromkeys(addresses.tolist(), width))
        return load(self, pointers, mask, *rest, **named)

    monkeypatch.setattr(Builder, "create_masked_load", recorded)

    def count(**tensors):
        found = Counter()
        for program in taken.values():
            for address in set(np.concatenate(program).tolist()):
                for name, tensor in tensors.items():
                    if 0 <= address - tensor.data_ptr() < tensor.nbytes:
                        found[name] += widths[address]
        return found

    return count


def weight_of(form, n, k):
    if form == "dense":
        return normal(n, k, seed=2), {}
    if form == "W8A8":
        codes = torch.ones(n, k, dtype=torch.int8)
        return Int8(codes, torch.ones(n)), {"codes": codes}
    return planes(form, n, k=k)[0], {}


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("form", ["dense", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "W8A8"])
def test_a_weight_is_read_once(asked, form, rows):
    weight, watched = weight_of(form, 32, 256)
    if isinstance(weight, Planes):
        kinds = ("codes", "high", "scales", "supers")
        watched = dict(zip(kinds, weight.tensors, strict=True))
    watched = watched or {"weight": weight}
    # one tensor may stand for another that a format has not
    watched = {tensor.data_ptr(): (name, tensor) for name, tensor in watched.items()}
    watched = dict(watched.values())
    linear(normal(rows, 256), weight, TABLE)
    found = asked(**watched)
    for name, tensor in watched.items():
        assert tensor.nbytes <= found[name], "not all was read, so not all was counted"
    wanted = sum(tensor.nbytes for tensor in watched.values())
    assert sum(found.values()) <= MOST * wanted, found


@pytest.mark.parametrize("rows", [1, 7])
def test_nothing_behind_a_weight_is_read(asked, rows):
    """Three blocks a row, taken four at a time: the last row's end is the tensor's."""
    weight, _ = planes("Q8_0", 32, k=96)
    size = weight.codes.numel()
    held = torch.cat([weight.codes.flatten(), torch.zeros(4096, dtype=torch.int8)])
    weight = attrs.evolve(weight, codes=held[:size].view_as(weight.codes))
    linear(normal(rows, 96), weight, TABLE)
    found = asked(codes=weight.codes, behind=held[size:])
    assert found["codes"] >= size
    assert not found["behind"]


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("store", ["bf16", "q8_0", "f8_e5m2", "q8_0 by groups"])
def test_a_cache_is_read_once_for_all_heads_of_a_group(asked, store, flash):
    launch = GROUPED if "groups" in store else plan(programs=5)
    store = store.split()[0]
    lengths, shape = [250, 100], heads(hq=8, hkv=2, d=64)
    problem = Problem(lengths, [1, 1], shape, dtype="bf16", store=store, block=16)
    kv = problem.kv
    watched = {"data": kv.data} if kv.scales is None else {"data": kv.data, "scales": kv.scales}
    attention(problem.q, kv, problem.sequences(flash=flash), shape, launch)
    found = asked(**watched)
    for name, tensor in watched.items():
        a_token = tensor[0, :, :, 0].nbytes
        assert sum(lengths) * a_token <= found[name] <= MOST * sum(lengths) * a_token
