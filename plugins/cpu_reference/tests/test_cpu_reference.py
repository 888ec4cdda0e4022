import numpy as np
import pytest

from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import OPS, BackendOptions, ConfigError, ProbeContext, SupportLevel
from halogen_core.spi.testing import Share, step_batch, tiny_checkpoint
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
