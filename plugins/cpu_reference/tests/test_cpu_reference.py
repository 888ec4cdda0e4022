import numpy as np
import pytest
import torch

from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import (
    OPS,
    BackendOptions,
    ConfigError,
    ProbeContext,
    SupportLevel,
    WeightRole,
)
from halogen_core.spi.testing import Share, f32_tensor, step_batch, tiny_checkpoint
from halogen_cpu_reference import plugin
from halogen_cpu_reference.backend import create


def test_probe_and_spec_agree():
    (spec,) = plugin.halogen_backends()
    assert spec.name == "cpu_reference"
    assert plugin.halogen_probe(spec.name, ProbeContext()).score > 0
    assert plugin.halogen_probe("other", ProbeContext()) is None


def test_every_op_is_native():
    placed = {p.op: p.level for p in create(BackendOptions()).placement()}
    assert placed == dict.fromkeys(OPS, SupportLevel.NATIVE)


@pytest.mark.parametrize("device", ["cpu", "cpu_reference:0", None])
def test_its_devices(device):
    assert create(BackendOptions(device=device)).capabilities().name == "cpu_reference"


def test_other_devices_and_options_are_refused():
    with pytest.raises(ConfigError, match="`elsewhere:3`"):
        create(BackendOptions(device="elsewhere:3"))
    with pytest.raises(ConfigError, match="`speed` is unknown"):
        create(BackendOptions(extra={"speed": "11"}))
    with pytest.raises(ConfigError, match="allowed are f32, f16, bf16"):
        create(BackendOptions(extra={"dtype": "f64"}))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_a_model_runs_in_every_dtype(dtype):
    backend = create(BackendOptions(extra={"dtype": dtype}))
    checkpoint = tiny_checkpoint("llama")
    config = config_of(checkpoint)
    decoder = Decoder.load(config, checkpoint, backend)
    layout = backend.kv_layout(kv_spec(config, dtype=dtype, block_size=16))
    kv = backend.kv_alloc(layout, 4)
    batch = step_batch([Share(tokens=(3, 1, 4, 1, 5), blocks=(2,))], 16)
    logits = backend.download(decoder.logits(backend.ops, backend.upload_step(batch), kv))
    assert logits.shape == (1, 97)
    assert np.isfinite(logits).all()
    assert logits.dtype == np.float32


def test_prepacked_weights_are_the_same_numbers():
    """OneDNN's layout changes no bit of a weight, and products stay within float32 rounding."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((960, 137)).astype(np.float32)
    backend = create(BackendOptions())
    weight = backend.pack([f32_tensor("w", values)], WeightRole.LINEAR)
    assert weight.payload.is_mkldnn
    np.testing.assert_array_equal(backend.unpack(weight), values)
    bias = backend.pack([f32_tensor("b", values[:, 0].copy())], WeightRole.BIAS)
    for rows in (0, 1, 8, 33):
        x = rng.standard_normal((rows, 137)).astype(np.float32)
        got = backend.download(backend.ops.linear(backend.upload(x), weight, bias=bias))
        want = x.astype(np.float64) @ values.T.astype(np.float64) + values[:, 0]
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 3])
def test_deterministic_mode_is_batch_invariant_at_model_shapes(threads):
    before = torch.get_num_threads()
    try:
        backend = create(BackendOptions(deterministic=True, threads=threads))
        rng = np.random.default_rng(0)
        values = rng.standard_normal((960, 576)).astype(np.float32)
        weight = backend.pack([f32_tensor("w", values)], WeightRole.LINEAR)
        x = rng.standard_normal((41, 576)).astype(np.float32)

        def product(rows):
            return backend.download(backend.ops.linear(backend.upload(x[rows]), weight))

        whole = product(slice(None))
        for start, end in ((0, 1), (3, 4), (40, 41), (0, 7), (5, 22), (1, 41)):
            np.testing.assert_array_equal(product(slice(start, end)), whole[start:end])
    finally:
        torch.set_num_threads(before)
