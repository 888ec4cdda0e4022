"""fp8 weights on the simulated part: emulated in its compute dtype, the error told."""

import sys
from pathlib import Path

import numpy as np
import pytest
from ascend_steps import open_sim

from halogen_core.spi import FLOAT8, ModelError, OpSignature, WeightRole

sys.path.insert(0, str(Path(__file__).parents[3] / "tests/unit/loader"))
from fp8_files import float8_tensor


@pytest.mark.parametrize("kind", FLOAT8)
def test_products_and_what_is_told(kind):
    rng = np.random.default_rng(1)
    made = [float8_tensor(rng, kind, (32, 200), (128, 128), 1e-4) for _ in range(2)]
    want = np.concatenate([values for _, values in made])
    backend = open_sim()
    signature = OpSignature(op="linear", dtype=backend.options.dtype, weight_format=kind)
    assert backend.supports(signature).level != "no"
    assert backend.capabilities().weight_formats[kind] == "emulated"
    weight = backend.pack([tensor for tensor, _ in made], WeightRole.LINEAR)
    np.testing.assert_allclose(backend.unpack(weight), want, rtol=2.0**-11, atol=2.0**-25)
    told = {p.op: p.reasons for p in backend.placement()}
    assert any(f"2 {kind} tensors are kept as F16, values within" in r for r in told["linear"])
    x = rng.standard_normal((3, 200)).astype(np.float16).astype(np.float32)
    got = backend.download(backend.ops.linear(backend.upload(x), weight))
    exact = x.astype(np.float64) @ want.T
    assert np.abs(got - exact).max() <= 4e-3 * np.abs(exact).max()


def test_experts():
    tensor, want = float8_tensor(np.random.default_rng(2), "F8_E4M3", (2, 32, 64), (1, 64), 1e-3)
    backend = open_sim()
    weight = backend.pack([tensor], WeightRole.EXPERTS)
    np.testing.assert_allclose(backend.unpack(weight), want, rtol=2.0**-11, atol=2.0**-25)


def test_values_out_of_range_are_refused():
    tensor, _ = float8_tensor(np.random.default_rng(3), "F8_E4M3", (32, 64), (32, 64), 300)
    with pytest.raises(ModelError) as caught:
        open_sim().pack([tensor], WeightRole.LINEAR)
    assert caught.value.code == "HRT-2412"
