"""SmolLM2 and Gemma 3 as quantised, against the same weights in float32 on the reference backend."""

import inspect
import json.decoder
import random
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from ggml_cases import backend_for

from halogen_core.loader import load_tokenizer, open_model
from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import BackendOptions, StepShape, TorchBackend, WeightRole
from halogen_core.spi.testing import Share, step_batch
from halogen_cpu_ggml.backend import create

ROOT = Path(__file__).parents[3]
SEQUENCES, LENGTH = 4, 250
KL_LIMIT, TOP1_LIMIT = 0.01, 0.95


def texts():
    """Licence prose, code, and prose inside code."""
    return [
        (ROOT / "LICENSE").read_text("utf-8")[:4000],
        inspect.getsource(json.decoder),
        inspect.getsource(random)[3000:9000],
        (ROOT / "LICENSE").read_text("utf-8")[5000:9000],
    ]


class Model:
    def __init__(self, path, backend, kv_dtype, change=lambda checkpoint: checkpoint):
        stored = open_model(path)
        checkpoint = change(stored)
        self.backend, config = backend, config_of(checkpoint)
        self.tokenizer = load_tokenizer(stored)
        self.decoder = Decoder.load(config, checkpoint, backend)
        layout = backend.kv_layout(kv_spec(config, dtype=kv_dtype, block_size=16))
        self.kv = backend.kv_alloc(layout, 64)

    def logprobs(self, ids):
        share = Share(tokens=tuple(ids), blocks=tuple(range(-(-len(ids) // 16))), all_logits=True)
        meta = self.backend.upload_step(step_batch([share], 16))
        logits = self.backend.download(self.decoder.logits(self.backend.ops, meta, self.kv))
        return torch.from_numpy(logits).log_softmax(-1)


def agreement(model, reference):
    """Mean KL(reference || model) and share of equal top tokens over all positions."""
    torch.set_num_threads(1)
    divergence, equal = [], []
    for text in texts():
        ids = model.tokenizer.encode(text)[:LENGTH]
        assert len(ids) == LENGTH
        p, q = reference.logprobs(ids), model.logprobs(ids)
        divergence.append((p.exp() * (p - q)).sum(-1))
        equal.append(p.argmax(-1) == q.argmax(-1))
    return float(torch.cat(divergence).mean()), float(torch.cat(equal).float().mean())


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_path):
    return Model(smollm2_path, TorchBackend(), "f32")


@pytest.mark.parametrize("mode", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_smollm2_distributions(smollm2_path, smollm2_reference, mode):
    kl, top1 = agreement(Model(smollm2_path, backend_for(mode), "f16"), smollm2_reference)
    assert kl <= KL_LIMIT
    assert top1 >= TOP1_LIMIT


class InFloat8:
    """A checkpoint whose layers' matrices are next to its own in F8_E4M3, blocks of 128 × 128."""

    def __init__(self, stored):
        self.stored = stored

    def __getattr__(self, name):
        return getattr(self.stored, name)

    def tensor(self, name):
        tensor = self.stored.tensor(name)
        if not name.startswith("blk.") or len(tensor.shape) != 2:
            return tensor
        plain = TorchBackend()
        values = torch.from_numpy(plain.unpack(plain.pack([tensor], WeightRole.LINEAR)))
        lines = values.abs().split(128)
        largest = [[part.max() for part in line.split(128, dim=1)] for line in lines]
        scale = torch.tensor(largest) / 448
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        codes = (values / wide[: len(values), : values.shape[1]]).to(torch.float8_e4m3fn)
        return attrs.evolve(
            tensor,
            format="F8_E4M3",
            data=codes.view(torch.uint8).numpy().reshape(-1),
            aux={"scale": scale.numpy(), "block": np.array([128, 128], np.int32)},
        )


@pytest.mark.slow
def test_smollm2_in_fp8(smollm2_path):
    backend = create(BackendOptions(threads=2))  # of its own: it counts what it converts
    reference = Model(smollm2_path, TorchBackend(), "f32", InFloat8)
    kl, top1 = agreement(Model(smollm2_path, backend, "f16", InFloat8), reference)
    assert any(
        "210 F8_E4M3 tensors are kept as F16" in line for line in backend.conversions.lines()
    )
    assert kl <= KL_LIMIT
    assert top1 >= TOP1_LIMIT


@pytest.mark.slow
def test_smollm2_with_8_bit_kv(smollm2_path, smollm2_reference):
    kl, top1 = agreement(Model(smollm2_path, backend_for("auto"), "q8_0"), smollm2_reference)
    assert kl <= KL_LIMIT
    assert top1 >= TOP1_LIMIT


@pytest.mark.slow
def test_gemma3_distributions(gemma3_path):
    reference = Model(gemma3_path, TorchBackend(), "f32")
    kl, top1 = agreement(Model(gemma3_path, backend_for("auto"), "f16"), reference)
    assert kl <= KL_LIMIT
    assert top1 >= TOP1_LIMIT


@pytest.mark.parametrize("mode", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_captured_steps_equal_eager_ones(smollm2_path, mode):
    """Batches of every bucket edge: a graph with room to spare gives what an exact one gives."""
    from halogen_core.engine.runner import Runner

    backend = backend_for(mode)
    model = Model(smollm2_path, backend, "f16")
    runner = Runner(backend, model.decoder, model.kv)
    rng = np.random.default_rng(0)
    for counts in ([1], [5], [1, 1, 1], [9, 1, 7], [1] * 7):
        shares = [
            Share(tokens=tuple(rng.integers(0, 40000, n)), blocks=(3 * i, 3 * i + 1))
            for i, n in enumerate(counts)
        ]
        batch = step_batch(shares, 16)
        eager = runner.logits(batch).argmax(-1)
        shape = StepShape(prefill_tokens=sum(counts), decode_sequences=0, kv_tokens=0)
        for _ in range(2):
            np.testing.assert_array_equal(runner.step(batch, shape).token_ids, eager)
    assert runner.eager_steps == 0
