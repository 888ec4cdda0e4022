"""fp8 weights on cpu_ggml: 16 bits exactly or within a bound that is told, against float64."""

import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
from ggml_cases import backend_for, experts_beside_float64, relative

from halogen_core.spi import FLOAT8, ModelError, OpSignature, WeightRole
from halogen_cpu_ggml.reblock import ROUNDING, reblocked

sys.path.insert(0, str(Path(__file__).parents[3] / "tests/unit/loader"))
from fp8_files import FORMS, float8_tensor, spread, table
from fp8_models import distance, our_logits, write_model


def scaled(tensor, values, factor):
    """The same codes under scales times a power of two."""
    scale = (tensor.aux["scale"] * factor).astype(np.float32)
    return attrs.evolve(tensor, aux={**tensor.aux, "scale": scale}), values * factor


def powers(tensor, _):
    """The same codes under scales that are powers of two."""
    near = 2.0 ** np.round(np.log2(tensor.aux["scale"].astype(np.float64)))
    values = table(tensor.format)[tensor.data].reshape(tensor.shape)
    values = values * spread(near, tensor.aux["block"], tensor.shape)
    return attrs.evolve(tensor, aux={**tensor.aux, "scale": near.astype(np.float32)}), values


def unscaled(tensor):
    """The codes alone."""
    values = table(tensor.format)[tensor.data].reshape(tensor.shape)
    return attrs.evolve(tensor, aux={}), values


CASES = {
    "any scales": ("F8_E4M3", lambda t, v: (t, v), "F16", False),
    "any scales, e5m2": ("F8_E5M2", lambda t, v: (t, v), "F16", False),
    "powers of two": ("F8_E4M3", powers, "F16", True),
    "small powers of two": ("F8_E4M3", lambda t, v: scaled(*powers(t, v), 2.0**-20), "BF16", True),
    "powers of two, e5m2": ("F8_E5M2", powers, "F16", True),
    "large scales": ("F8_E4M3", lambda t, v: scaled(t, v, 2.0**20), "F32", False),
    "tiny scales": ("F8_E4M3", lambda t, v: scaled(t, v, 2.0**-24), "F32", False),
    "no scales": ("F8_E5M2", lambda t, v: unscaled(t), "F16", True),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_kept_exactly_or_the_error_is_told(case):
    kind, change, form, exact = CASES[case]
    tensor, values = float8_tensor(np.random.default_rng(0), kind, (100, 160), (48, 56))
    tensor, changed = change(tensor, values)
    b = backend_for("off")
    weight = b.pack([tensor], WeightRole.LINEAR)
    part = weight.payload.parts[0]
    assert (part.format, part.error == 0) == (form, exact)
    assert part.error <= ROUNDING
    got = b.unpack(weight).astype(np.float64)
    floor = part.error * np.abs(changed).max() if form == "F16" else 0
    np.testing.assert_allclose(got, changed, rtol=part.error, atol=min(floor, 2.0**-25))
    line = next(r for p in b.placement() for r in p.reasons if f"{kind} tensors" in r)
    assert "kept as" in line


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("kind", FLOAT8)
def test_products(backend, kind, rows):
    rng = np.random.default_rng(2)
    made = [float8_tensor(rng, kind, (40, 200), (128, 128)) for _ in range(3)]
    weight = backend.pack([t for t, _ in made], WeightRole.LINEAR)
    assert backend.supports(OpSignature(op="linear", weight_format=kind))
    x = rng.standard_normal((rows, 200), dtype=np.float32)
    got = backend.download(backend.ops.linear(backend.upload(x), weight))
    want = x.astype(np.float64) @ np.concatenate([v for _, v in made]).T
    assert relative(got, want) < 1e-3


def test_a_table_is_looked_up(backend):
    rng = np.random.default_rng(3)
    tensor, values = float8_tensor(rng, "F8_E4M3", (30, 72), (1, 72))
    weight = backend.pack([tensor], WeightRole.EMBEDDING)
    ids = np.array([3, 0, 29, 3], np.int32)
    got = backend.download(backend.ops.embed(backend.upload(ids), weight))
    np.testing.assert_allclose(got, values[ids], rtol=ROUNDING, atol=2.0**-25)


def test_experts(backend):
    rng = np.random.default_rng(4)
    gate_up, g = float8_tensor(rng, "F8_E4M3", (4, 128, 64), (48, 56), 1e-3)
    down, d = float8_tensor(rng, "F8_E4M3", (4, 64, 64), (1, 64), 1e-3)
    got, want = experts_beside_float64(backend, rng, gate_up, g, down, d)
    assert relative(got, want) < 2e-3


@pytest.mark.parametrize("form", FORMS)
def test_a_directory_gives_the_logits_of_the_stored_values(tmp_path, form):
    want = write_model(tmp_path / "m", form)
    got = our_logits(tmp_path / "m", backend_for("auto"))
    exact = form in ("powers of two", "no scales")
    assert distance(got, want) < (1e-5 if exact else 5e-3)


@pytest.mark.parametrize("form", ["compressed per channel", "transformers blocks"])
def test_a_directory_of_experts(tmp_path, form):
    want = write_model(tmp_path / "m", form, "Qwen3Moe")
    assert distance(our_logits(tmp_path / "m", backend_for("auto")), want) < 5e-3


@pytest.mark.parametrize("spoil", ["data", "scale", "NaN"])
def test_what_does_not_fit_is_refused(spoil):
    tensor, _ = float8_tensor(np.random.default_rng(5), "F8_E4M3", (60, 64), (48, 56))
    if spoil == "data":
        bad = attrs.evolve(tensor, data=tensor.data[:-1])
    elif spoil == "scale":
        bad = attrs.evolve(tensor, aux={**tensor.aux, "scale": tensor.aux["scale"][1:]})
    else:
        bad = attrs.evolve(tensor, data=np.full_like(tensor.data, 0x7F))
    with pytest.raises(ModelError) as caught:
        reblocked(bad)
    assert caught.value.code == "HRT-2411"
