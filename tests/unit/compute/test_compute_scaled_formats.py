"""INT4, int8 and MXFP4 of safetensors in plain torch, against float64."""

import attrs
import numpy as np
import pytest
from scaled_tensors import int4, int8, mxfp4

from halogen_core.errors import ModelError
from halogen_core.spi import BackendOptions, OpSignature, TorchBackend, WeightRole

CASES = {
    "grouped": lambda rng, shape: int4(rng, shape, 16),
    "symmetric": lambda rng, shape: int4(rng, shape, 32, zero=False, scale_dtype=np.float32),
    "act-order": lambda rng, shape: int4(rng, shape, 16, perm=True),
    "one-group": lambda rng, shape: int4(rng, shape, shape[-1]),
    "W8A16": int8,
    "W8A8": lambda rng, shape: int8(rng, shape, "W8A8"),
    "MXFP4": mxfp4,
}


@pytest.mark.parametrize("shape", [(5, 64), (3, 6, 64)], ids=["matrix", "experts"])
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_format(case, shape):
    tensor, values = CASES[case](np.random.default_rng(1), shape)
    role = WeightRole.EXPERTS if len(shape) == 3 else WeightRole.LINEAR
    backend = TorchBackend()
    assert backend.supports(OpSignature(op="linear", weight_format=tensor.format))
    got = backend.unpack(backend.pack([tensor, tensor], role))
    np.testing.assert_allclose(got, np.concatenate([values, values], -2), rtol=2**-23, atol=0)


def test_slabs_meet_their_own_scales(monkeypatch):
    monkeypatch.setattr("halogen_core.torch_backend.weights._SLAB", 3 * 64)
    tensor, values = int4(np.random.default_rng(2), (10, 64), 16)
    backend = TorchBackend(BackendOptions(extra={"dtype": "bf16"}))
    got = backend.unpack(backend.pack([tensor], WeightRole.LINEAR))
    np.testing.assert_allclose(got, values, rtol=2**-8)


@pytest.mark.parametrize("spoil", ["data", "scale", "zero", "perm"])
def test_what_does_not_fit_is_refused(spoil):
    tensor, _ = int4(np.random.default_rng(3), (4, 64), 16, perm=True)
    if spoil == "data":
        bad = attrs.evolve(tensor, data=tensor.data[:-1])
    elif spoil == "perm":
        bad = attrs.evolve(tensor, aux={**tensor.aux, "perm": np.zeros(64, np.int32)})
    else:
        bad = attrs.evolve(tensor, aux={**tensor.aux, spoil: tensor.aux[spoil][:, :-1]})
    with pytest.raises(ModelError) as caught:
        TorchBackend().pack([bad], WeightRole.LINEAR)
    assert caught.value.code == "HRT-2411"
