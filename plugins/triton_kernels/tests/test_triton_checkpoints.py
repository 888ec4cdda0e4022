"""Quantised Hugging Face directories, written by a test, through loader and backend."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from halogen_core.engine.batch import build_step
from halogen_core.loader import open_model
from halogen_core.spi import BackendOptions, TorchBackend, WeightRole
from halogen_triton.backend import TritonBackend
from halogen_triton.launch import Launch, Rule, Tuning

sys.path.insert(0, str(Path(__file__).parents[3] / "tests/unit/loader"))
from packed_files import Packer, write_packed

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_backend import item, open_runner, triton_backend

DEVICE = os.environ.get("HALOGEN_TEST_DEVICE", "cpu")
WIDE = Launch(block_n=32, block_m=16, block_k=128)
RULES = {
    kind: (Rule(launch=WIDE),)
    for kind in ("plane_gemv", "plane_gemm", "int8_gemm", "dense_gemv", "dense_gemm", "prefill")
}
FORMS = {
    "awq": {"group": 32},
    "gptq": {"group": 32, "act_order": True},
    "int8": {},
    "mxfp4": {},
    "packed8": {},
}
HIDDEN, INNER, VOCAB = 64, 128, 32
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
}


def shapes():
    at = "blk.0."
    linear = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    linear |= {"ffn_gate": (INNER, 64), "ffn_up": (INNER, 64), "ffn_down": (64, INNER)}
    norms = {f"{at}{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    top = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    return top | norms | {f"{at}{name}.weight": shape for name, shape in linear.items()}


@pytest.fixture
def backend():
    table = Tuning(arch="test", source="test", rules=RULES)
    return TritonBackend(BackendOptions(extra={"dtype": "f32"}), tuning=table, device=DEVICE)


@pytest.mark.parametrize("form", FORMS)
def test_a_directorys_weights_multiply_as_their_definition(tmp_path, backend, form):
    packer = Packer(form, **FORMS[form])
    model = open_model(write_packed(tmp_path / "m", packer, shapes(), **CONFIG))
    names = [f"blk.0.attn_{part}.weight" for part in "qkv"]
    weight = backend.pack([model.tensor(name) for name in names], WeightRole.LINEAR)
    prefix = "model.layers.0.self_attn."
    want = np.concatenate([packer.values[f"{prefix}{part}_proj"] for part in "qkv"])
    assert weight.shape == want.shape
    assert weight.nbytes < 1.5 * want.size
    assert np.array_equal(backend.unpack(weight), want.astype(np.float32))
    for rows in (1, 3):
        x = np.random.default_rng(rows).standard_normal((rows, HIDDEN)).astype(np.float32)
        got = backend.download(backend.ops.linear(backend.upload(x), weight))
        exact = x.astype(np.float64) @ want.T
        # int8 activations are wanted by the format, and cost what rounding costs
        bound = 1e-2 if form == "int8" else 3e-6
        assert np.abs(got - exact).max() <= bound * np.abs(exact).max()


SOME = [pytest.param(f, marks=() if f == "gptq" else pytest.mark.slow) for f in FORMS]


@pytest.mark.parametrize("form", SOME)
def test_a_whole_model_gives_the_plain_backends_logits(tmp_path, form):
    """From files to logits: a prompt, then a decoding step beside a second prompt."""
    packer = Packer(form, **FORMS[form])
    model = open_model(write_packed(tmp_path / "m", packer, shapes(), **CONFIG))
    own = open_runner(triton_backend(), model)
    plain = TorchBackend(BackendOptions(extra={"dtype": "f32"}), name="torch")
    plain = open_runner(plain, model)
    tokens = np.random.default_rng(3).integers(0, VOCAB, 20).tolist()
    for items in (
        [item(tokens, 0, 9, [7])],
        [item(tokens, 9, 1, [7]), item(tokens[::-1], 0, 6, [2])],
        [item(tokens, 10, 1, [7])],
    ):
        batch = build_step(items, 16).batch
        got, want = own.logits(batch), plain.logits(batch)
        # int8 activations are rounded here and exact there
        bound = 5e-2 if form == "int8" else 3e-5
        assert np.abs(got - want).max() <= bound * np.abs(want).max()


def test_tensors_in_reused_memory_are_not_confused(tmp_path, backend):
    packer = Packer("awq", group=32)
    model = open_model(write_packed(tmp_path / "m", packer, shapes(), **CONFIG))
    kept = {}
    for name in ("gate", "up"):
        kept[name] = backend.pack([model.tensor(f"blk.0.ffn_{name}.weight")], WeightRole.LINEAR)
    for name, weight in kept.items():
        want = packer.values[f"model.layers.0.mlp.{name}_proj"]
        assert np.array_equal(backend.unpack(weight), want.astype(np.float32))


def test_claims_name_every_packed_format(backend):
    claims = backend.capabilities().weight_formats
    assert {claims[name] for name in ("INT4", "MXFP4", "W8A16", "W8A8", "Q4_K")} == {"native"}
