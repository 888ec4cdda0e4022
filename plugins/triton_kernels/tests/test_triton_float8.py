"""fp8 weights on the Triton backend: dense in its dtype, exactly there or with the error told."""

import os
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest

from halogen_core.spi import FLOAT8, BackendOptions, ModelError, WeightRole
from halogen_triton.backend import TritonBackend
from halogen_triton.launch import Launch, Rule, Tuning

sys.path.insert(0, str(Path(__file__).parents[3] / "tests/unit/loader"))
from fp8_files import float8_tensor
from fp8_models import distance, our_logits, write_model

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_backend import triton_backend

DEVICE = os.environ.get("HALOGEN_TEST_DEVICE", "cpu")
WIDE = Launch(block_n=32, block_m=16, block_k=64)
RULES = {kind: (Rule(launch=WIDE),) for kind in ("dense_gemv", "dense_gemm", "prefill")}


def opened(dtype):
    table = Tuning(arch="test", source="test", rules=RULES)
    return TritonBackend(BackendOptions(extra={"dtype": dtype}), tuning=table, device=DEVICE)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("kind", FLOAT8)
def test_products_and_what_is_told(kind, dtype):
    rng = np.random.default_rng(1)
    made = [float8_tensor(rng, kind, (24, 200), (128, 128), 1e-4) for _ in range(2)]
    want = np.concatenate([values for _, values in made])
    backend = opened(dtype)
    assert backend.capabilities().weight_formats[kind] == "emulated"
    weight = backend.pack([tensor for tensor, _ in made], WeightRole.LINEAR)
    rounding = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}[dtype]
    tiny = 2.0**-25 if dtype == "f16" else 0
    np.testing.assert_allclose(backend.unpack(weight), want, rtol=rounding, atol=tiny)
    (line,) = backend.conversions.lines()
    assert f"2 {kind} tensors are kept as {dtype.upper()}" in line
    assert ("values within" in line) == (dtype != "f32")
    assert any(line in p.reasons for p in backend.placement() if p.op == "linear")
    for rows in (1, 3):
        x = rng.standard_normal((rows, 200)).astype(np.float32)
        got = backend.download(backend.ops.linear(_in_dtype(backend, x), weight))
        exact = x.astype(np.float64) @ want.T
        assert np.abs(got - exact).max() <= 8 * max(rounding, 1e-6) * np.abs(exact).max()


def _in_dtype(backend, x):
    return backend.upload(x).to(backend.dtype)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_powers_of_two_are_kept_exactly(dtype):
    tensor, _ = float8_tensor(np.random.default_rng(2), "F8_E4M3", (24, 200), (128, 128))
    aux = {**tensor.aux, "scale": np.float32([[2.0**-9, 2.0**-7]])}
    backend = opened(dtype)
    backend.pack([attrs.evolve(tensor, aux=aux)], WeightRole.LINEAR)
    assert backend.conversions.lines()[0].endswith("exactly")


def test_experts_and_tables():
    tensor, want = float8_tensor(np.random.default_rng(3), "F8_E4M3", (3, 20, 72), (1, 72))
    backend = opened("f32")
    experts = backend.pack([tensor, tensor], WeightRole.EXPERTS)
    doubled = np.concatenate([want, want], 1).astype(np.float32)
    assert np.array_equal(backend.unpack(experts), doubled)
    table, want = float8_tensor(np.random.default_rng(4), "F8_E4M3", (20, 72), (20, 72))
    packed = backend.pack([table], WeightRole.EMBEDDING)
    ids = np.array([3, 0, 19], np.int32)
    got = backend.download(backend.ops.embed(backend.upload(ids), packed))
    assert np.array_equal(got, want[ids].astype(np.float32))


def test_what_does_not_fit_is_refused():
    tensor, _ = float8_tensor(np.random.default_rng(5), "F8_E4M3", (24, 200), (128, 128))
    for bad in (
        attrs.evolve(tensor, data=tensor.data[:-1]),
        attrs.evolve(tensor, data=np.full_like(tensor.data, 0xFF)),
    ):
        with pytest.raises(ModelError) as caught:
            opened("bf16").pack([bad], WeightRole.LINEAR)
        assert caught.value.code == "HRT-2411"


SLOW = pytest.mark.slow
FORMS = [
    "transformers blocks",
    pytest.param("compressed per channel", marks=SLOW),
    pytest.param("compressed per tensor, static", marks=SLOW),
]


@pytest.mark.parametrize("form", FORMS)
def test_a_directory_gives_the_logits_of_the_stored_values(tmp_path, form):
    # the oracle is transformers in float64; a machine with a GPU may have none that imports
    pytest.importorskip("transformers", exc_type=ImportError)
    want = write_model(tmp_path / "m", form)
    assert distance(our_logits(tmp_path / "m", triton_backend()), want) < 1e-4
