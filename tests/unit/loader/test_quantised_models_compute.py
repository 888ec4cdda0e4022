"""A quantised directory answers as the same values stored plainly, in torch and in cpu_ggml."""

import attrs
import numpy as np
import pytest
from packed_files import Packer, write_packed
from tiny_files import hf_name, llama_shapes

from halogen_core.loader import open_model
from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import BackendOptions, QuantTensor, TorchBackend
from halogen_core.spi.testing import MemoryCheckpoint, Share, step_batch
from halogen_cpu_ggml.backend import create

FORMS = [
    ("awq", {"group": 32}),
    ("gptq", {"group": 32, "act_order": True}),
    ("gptq", {"group": 16}),
    ("packed", {"group": 32, "symmetric": True}),
    ("packed8", {}),
    ("int8", {}),
    ("mxfp4", {}),
]
TOKENS = (5, 9, 2, 7, 11, 3)


@pytest.fixture(scope="module")
def ggml():
    backend = create(BackendOptions(threads=1))
    yield backend
    backend.close()


def plain(model, packer):
    """The same model with the packer's float64 values as F32."""
    tensors = {}
    for name in model.names():
        values = packer.values.get(hf_name(name).removesuffix(".weight"))
        if values is None:
            tensors[name] = model.tensor(name)
        else:
            data = values.astype(np.float32).reshape(-1).view(np.uint8)
            tensors[name] = QuantTensor(format="F32", shape=values.shape, data=data, name=name)
    return MemoryCheckpoint(
        architecture=model.architecture,
        hparams=dict(model.hparams),
        tensors=tensors,
        rope_style=model.rope_style,
    )


def logits(backend, checkpoint):
    config = config_of(checkpoint)
    decoder = Decoder.load(config, checkpoint, backend)
    size = backend.capabilities().kv_block_sizes[0]
    kv = backend.kv_alloc(backend.kv_layout(kv_spec(config, dtype="f32", block_size=size)), 2)
    batch = step_batch([Share(tokens=TOKENS, blocks=(1,), start=0)], size)
    batch = attrs.evolve(batch, logit_rows=np.arange(len(TOKENS), dtype=np.int32))
    return backend.download(decoder.logits(backend.ops, backend.upload_step(batch), kv))


@pytest.mark.parametrize(("form", "options"), FORMS)
def test_answers_are_those_of_the_plain_values(tmp_path, ggml, form, options):
    packer = Packer(form, **options)
    model = open_model(write_packed(tmp_path / "m", packer, llama_shapes()))
    truth = logits(TorchBackend(), plain(model, packer))
    size = np.sqrt(np.mean(truth**2))
    assert np.abs(logits(TorchBackend(), model) - truth).max() < 1e-5 * size
    # ggml's kernels round activations to 8 bits before quantised weights
    assert np.abs(logits(ggml, model) - truth).max() < 0.1 * size
