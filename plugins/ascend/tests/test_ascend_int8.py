"""Int8 weights on the simulated part: experts, wide activations, what is refused."""

import numpy as np
import pytest
from ascend_steps import open_sim

from halogen_core.spi import ConfigError, QuantTensor, WeightRole


def int8(rng, form, shape):
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    scale = rng.uniform(0.5, 1.5, shape[:-1]).astype(np.float32) / 1024
    data = codes.reshape(-1).view(np.uint8)
    tensor = QuantTensor(format=form, shape=shape, data=data, name="w", aux={"scale": scale})
    return tensor, codes * scale.astype(np.float64)[..., None]


@pytest.mark.parametrize("form", ["W8A8", "W8A16"])
def test_experts_have_a_scale_per_output_of_each(form):
    tensor, values = int8(np.random.default_rng(0), form, (3, 32, 64))
    backend = open_sim()
    weight = backend.pack([tensor], WeightRole.EXPERTS)
    np.testing.assert_allclose(backend.unpack(weight), values, rtol=2.0**-11, atol=2.0**-25)


@pytest.mark.parametrize(("dtype", "error"), [("f32", 2e-6), ("bf16", 2.0**-8), ("f16", 2.0**-11)])
def test_w8a16_takes_activations_as_wide_as_the_backend_computes(dtype, error):
    rng = np.random.default_rng(1)
    tensor, values = int8(rng, "W8A16", (32, 64))
    backend = open_sim(dtype=dtype)
    kind = backend.capabilities().weight_formats["W8A16"]
    assert kind == ("emulated" if dtype == "f32" else "native")
    weight = backend.pack([tensor], WeightRole.LINEAR)
    # beyond float16's range, which bf16 and float32 hold
    x = rng.choice([-1.0, 1.0], (4, 64)) * (2.0**17 if dtype != "f16" else 1.0)
    x *= 1 + (2.0**-16 if dtype == "f32" else 0.0)
    table = QuantTensor(
        format="F32", shape=x.shape, data=x.astype(np.float32).reshape(-1).view(np.uint8)
    )
    ids = backend.upload(np.arange(4, dtype=np.int32))
    rows = backend.ops.embed(ids, backend.pack([table], WeightRole.EMBEDDING))
    got = backend.download(backend.ops.linear(rows, weight))
    exact = x @ values.T
    assert np.abs(got - exact).max() <= error * np.abs(exact).max()


@pytest.mark.parametrize("form", ["W8A8", "W8A16"])
@pytest.mark.parametrize("role", [WeightRole.LINEAR, WeightRole.EXPERTS])
def test_codes_and_scales_that_do_not_fit_are_refused(form, role):
    shape = (2, 32, 64) if role is WeightRole.EXPERTS else (32, 64)
    tensor, _ = int8(np.random.default_rng(2), form, shape)
    short = {"data": tensor.data[:-1]}, {"aux": {"scale": tensor.aux["scale"][..., :-1]}}
    for change in short:
        fields = {"data": tensor.data, "aux": tensor.aux, **change}
        bad = QuantTensor(format=form, shape=shape, name="w", **fields)
        with pytest.raises(ConfigError, match="`w`") as caught:
            open_sim().pack([bad], role)
        assert caught.value.code == "HRT-7107"
