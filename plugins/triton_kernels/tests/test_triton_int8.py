"""W8A8: rounding within norms and gated activations is the rounding of its own, bit for bit."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from halogen_core.engine.batch import build_step
from halogen_core.spi import QuantTensor
from halogen_triton import capture, int8
from halogen_triton.int8 import gated_rounded, rms_norm_rounded, round_rows
from halogen_triton.pointwise import ACTIVATIONS, gated_act, rms_norm

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_backend import open_runner, steps, triton_backend
from tiny_models import TinyCheckpoint, tiny

DEVICE = os.environ.get("HALOGEN_TEST_DEVICE", "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of what is rounded to int8, relative to a row's largest value."""


def normal(*shape, dtype=torch.float32, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen).to(DEVICE, dtype)


def same(got, want):
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.scales, want.scales)
    assert got.dtype == want.dtype


def near_exact(rounded, want):
    """Codes times scales lie half a step, and the rounding before it, from float64."""
    given = rounded.codes.double() * rounded.scales.double()[:, None]
    most = want.abs().amax(1, keepdim=True)
    bound = (0.5 / 127 + 2 * ROUNDING[rounded.dtype]) * most
    assert (given - want).abs().le(bound).all()
    assert torch.allclose(
        rounded.scales.double(), most[:, 0] / 127, rtol=2 * ROUNDING[rounded.dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "h"), [(1, 33), (3, 64), (2, 1536), (0, 8)])
@pytest.mark.parametrize("adds", [False, True])
def test_a_norm_rounds_its_own_rows(dtype, rows, h, adds):
    x, w = normal(rows, h, dtype=dtype), normal(h, seed=3)
    residual = normal(rows, h, dtype=dtype, seed=2) if adds else None
    got, total = rms_norm_rounded(x, w, 1e-5, residual=residual)
    want, sums = rms_norm(x, w, 1e-5, residual=residual)
    assert torch.equal(total, sums)
    assert torch.equal(got.exact, want)
    same(got, round_rows(want))
    if rows:
        v = total.double()
        near_exact(got, v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "f"), [(1, 37), (3, 96), (2, 1500), (0, 8)])
def test_an_activation_rounds_its_own_rows(dtype, kind, rows, f):
    x = 4 * normal(rows, 2 * f, dtype=dtype)
    got = gated_rounded(x, ACTIVATIONS[kind])
    same(got, round_rows(gated_act(x, ACTIVATIONS[kind])))
    if kind == "silu" and rows:
        gate, up = x.double().chunk(2, 1)
        near_exact(got, torch.nn.functional.silu(gate) * up)


def test_rows_of_zeros_and_strided_rows():
    x = normal(3, 100)
    x[1] = 0
    wide = torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, :100]
    same(gated_rounded(wide, 1), round_rows(gated_act(x, 1)))
    got, _ = rms_norm_rounded(x, torch.ones(100, device=DEVICE), 1e-5)
    assert not got.codes[1].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("k", [100, 5000])
def test_what_is_no_number_spoils_its_row_alone(bad, k):
    x = normal(3, 2 * k)
    x[1, k // 3] = x[1, k + k // 3] = bad
    for rounded in (round_rows(x), gated_rounded(x, 1)):
        assert rounded.scales.isnan().tolist() == [False, True, False]
    normed, _ = rms_norm_rounded(x[:, :k].contiguous(), torch.ones(k, device=DEVICE), 1e-5)
    assert normed.scales.isnan().tolist() == [False, True, False]


def test_rows_too_wide_for_one_program_are_rounded_apart(monkeypatch):
    monkeypatch.setattr(int8, "_WIDEST", 32)
    x = normal(2, 80)
    same(gated_rounded(x, 1), round_rows(gated_act(x, 1)))


def w8a8_model():
    """A tiny llama of int8 matrices with a scale per row."""
    plain, rng = tiny("llama"), np.random.default_rng(0)
    tensors = dict(plain.tensors)
    for name, tensor in plain.tensors.items():
        if name.startswith("blk.") and len(tensor.shape) == 2:
            codes = rng.integers(-127, 128, tensor.shape).astype(np.int8)
            scale = np.full(tensor.shape[0], tensor.shape[1] ** -0.5 / 64, np.float32)
            tensors[name] = QuantTensor(
                format="W8A8", shape=tensor.shape, data=codes.reshape(-1).view(np.uint8),
                name=name, aux={"scale": scale},
            )  # fmt: skip
    return TinyCheckpoint(architecture="llama", hparams=plain.hparams, tensors=tensors)


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.calls = kernel, 0

    def __getitem__(self, grid):
        def launch(*arguments, **named):
            self.calls += 1
            return self.kernel[grid](*arguments, **named)

        return launch


@pytest.mark.slow
def test_a_layer_rounds_apart_only_what_attention_leaves(monkeypatch):
    kernel = Counted(int8.kernels.round_rows)
    monkeypatch.setattr(int8.kernels, "round_rows", kernel)
    model = w8a8_model()
    own, apart = open_runner(triton_backend(), model), open_runner(triton_backend(), model)
    # whoever replaces an op expects tensors, so nothing is fused for him
    apart.backend.ops.gated_act = apart.backend.ops.gated_act
    assert own.backend.triton_ops.rounds
    layers, met = own.decoder.config.num_layers, {}
    for items in steps():
        batch = build_step(items, 16).batch
        got = {}
        for name, runner in (("own", own), ("apart", apart)):
            kernel.calls = 0
            got[name] = runner.logits(batch)
            met[name] = kernel.calls
        assert np.array_equal(got["own"], got["apart"])
        assert met == {"own": layers, "apart": 4 * layers}


def test_padded_static_inputs_give_the_eager_tokens():
    runner = open_runner(triton_backend(), w8a8_model())
    first, *_, last = steps()
    runner.logits(build_step(first, 16).batch)
    batch = build_step(last, 16).batch
    key = capture.capture_key(batch, 256, (4,))
    inputs = capture.StaticInputs(key, *runner.backend._trash, runner.backend.device)
    inputs.fill(batch)
    meta = capture.static_meta(runner.backend.upload_step, inputs)
    padded = runner._forward(meta).token_ids[:1].tolist()
    assert padded == runner._forward(runner.backend.upload_step(batch)).token_ids.tolist()


def test_models_without_such_weights_round_nothing():
    runner = open_runner(triton_backend(), tiny("llama", form="Q8_0"))
    assert not runner.backend.triton_ops.rounds
