"""8-bit floats by their definition: values, 16-bit copies, the error told, and what is refused."""

import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from halogen_core.errors import ModelError
from halogen_core.spi import (
    FLOAT8,
    BackendOptions,
    Conversions,
    OpSignature,
    QuantTensor,
    TorchBackend,
    WeightRole,
    check_float8,
    float8_halves,
    float8_rounding,
    float8_values,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "loader"))
from fp8_files import float8_tensor, numbers, table

BLOCKS = {
    "whole": lambda n, k: (n, k),
    "rows": lambda n, k: (1, k),
    "128": lambda n, k: (128, 128),
    "odd": lambda n, k: (48, 56),
    "larger than the matrix": lambda n, k: (1 << 30, 1 << 30),
}
SHAPES = [(200, 160), (3, 130, 72), (1, 1)]


def made(kind, shape, block, seed=0, size=0.01):
    rng = np.random.default_rng(seed)
    return float8_tensor(rng, kind, shape, BLOCKS[block](*shape[-2:]), size)


@pytest.mark.parametrize("kind", FLOAT8)
def test_every_code_means_what_its_definition_says(kind):
    codes = numbers(kind)
    tensor = QuantTensor(format=kind, shape=(1, len(codes)), data=codes, name="w")
    check_float8(tensor)
    got, want = float8_values(tensor)[0], table(kind)[codes]
    assert np.array_equal(got, want)
    assert np.array_equal(np.signbit(got), codes > 127), "a zero keeps its sign"
    assert float8_rounding(tensor, "f16") == float8_rounding(tensor, "bf16") == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", FLOAT8)
def test_values_are_products_rounded_once(kind, block, shape):
    tensor, values = made(kind, shape, block)
    check_float8(tensor)
    rows = values.reshape(-1, shape[-1])
    assert np.array_equal(float8_values(tensor), rows.astype(np.float32))
    for start, stop in ((0, 1), (len(rows) // 3, len(rows) - 1), (len(rows) - 1, len(rows))):
        assert np.array_equal(float8_values(tensor, start, stop), rows[start:stop].astype("f4"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", FLOAT8)
def test_sixteen_bits_are_next_to_the_values_and_the_error_bounds_them(kind, block, shape):
    tensor, values = made(kind, shape, block, seed=1)
    single = torch.from_numpy(float8_values(tensor))
    for name, dtype, normal in (
        ("f16", torch.float16, 2.0**-14),
        ("bf16", torch.bfloat16, 2.0**-126),
    ):
        got = torch.from_numpy(float8_halves(tensor, name).view(np.int16)).view(dtype)
        assert torch.equal(got, single.to(dtype))
        exact = np.abs(values.reshape(got.shape))
        moved = np.abs(np.abs(got.double().numpy()) - exact)
        usual = exact >= normal
        worst = (moved[usual] / exact[usual]).max(initial=0)
        told = float8_rounding(tensor, name)
        assert worst <= told <= {"f16": 2.0**-11, "bf16": 2.0**-8}[name]
        assert (moved[~usual] <= told * exact.max()).all()


def test_the_error_is_that_of_the_codes_that_occur():
    tensor = QuantTensor(
        format="F8_E4M3",
        shape=(2, 2),
        data=np.array([0x01, 0x08, 0x81, 0x00], np.uint8),
        aux={"scale": np.float32([[3e-7], [0.25]]), "block": np.array([1, 2], np.int32)},
        name="w",
    )
    exact = np.array([2.0**-9, 2.0**-6]) * np.float64(np.float32(3e-7))
    rounded = np.round(exact * 2**24) / 2**24
    want = np.abs(rounded - exact).max() / exact.max()
    assert float8_rounding(tensor, "f16") == pytest.approx(want, rel=1e-6)
    assert float8_rounding(attrs.evolve(tensor, data=np.zeros(4, np.uint8)), "f16") == 0


def test_powers_of_two_are_exact():
    tensor, _ = made("F8_E4M3", (64, 64), "odd")
    scale = np.float32([[2.0**-9, 2.0**-5], [2.0**-12, 1]])
    tensor = attrs.evolve(tensor, aux={**tensor.aux, "scale": scale})
    assert float8_rounding(tensor, "bf16") == float8_rounding(tensor, "f16") == 0
    tiny = attrs.evolve(tensor, aux={**tensor.aux, "scale": scale * np.float32(2.0**-12)})
    assert float8_rounding(tiny, "bf16") == 0 < float8_rounding(tiny, "f16")


SPOILT = {
    "codes": lambda t: attrs.evolve(t, data=t.data[:-1]),
    "no scale": lambda t: attrs.evolve(t, aux={"block": t.aux["block"]}),
    "no block": lambda t: attrs.evolve(t, aux={"scale": t.aux["scale"]}),
    "a row of scales": lambda t: attrs.evolve(t, aux={**t.aux, "scale": t.aux["scale"][1:]}),
    "blocks of zero": lambda t: attrs.evolve(t, aux={**t.aux, "block": np.array([0, 56])}),
    "an endless scale": lambda t: with_scale(t, np.inf),
    "a scale that is NaN": lambda t: with_scale(t, np.nan),
    "products out of range": lambda t: with_scale(t, 1e36),
    "NaN": lambda t: with_code(t, 0x7F),
    "negative NaN": lambda t: with_code(t, 0xFF),
    "a vector": lambda t: attrs.evolve(t, shape=(t.data.size,), aux={}),
    "nothing": lambda t: attrs.evolve(t, shape=(0, 64), data=t.data[:0], aux={}),
}


def with_scale(tensor, value):
    scale = tensor.aux["scale"].copy()
    scale[-1, -1] = value
    return attrs.evolve(tensor, aux={**tensor.aux, "scale": scale})


def with_code(tensor, code):
    data = tensor.data.copy()
    data[-1] = code
    return attrs.evolve(tensor, data=data)


@pytest.mark.parametrize("spoil", SPOILT)
def test_what_does_not_fit_is_refused(spoil):
    tensor, _ = made("F8_E4M3", (60, 64), "odd")
    for refuse in (
        check_float8,
        lambda bad: TorchBackend().pack([bad], WeightRole.LINEAR),
    ):
        with pytest.raises(ModelError) as caught:
            refuse(SPOILT[spoil](tensor))
        assert caught.value.code == "HRT-2411"


@pytest.mark.parametrize("code", [0x7C, 0x7D, 0xFC, 0xFF])
def test_infinity_and_nan_of_e5m2_are_refused(code):
    tensor, _ = made("F8_E5M2", (60, 64), "odd")
    with pytest.raises(ModelError, match="no numbers"):
        check_float8(with_code(tensor, code))


@pytest.mark.parametrize("shape", [(130, 72), (3, 130, 72)], ids=["matrix", "experts"])
@pytest.mark.parametrize("kind", FLOAT8)
def test_torch_gives_the_values(kind, shape, monkeypatch):
    monkeypatch.setattr("halogen_core.torch_backend.weights._SLAB", 50 * 72)
    tensor, values = made(kind, shape, "odd")
    role = WeightRole.EXPERTS if len(shape) == 3 else WeightRole.LINEAR
    backend = TorchBackend()
    assert backend.supports(OpSignature(op="linear", weight_format=kind))
    got = backend.unpack(backend.pack([tensor, tensor], role))
    assert np.array_equal(got, np.concatenate([values, values], -2).astype(np.float32))


def test_torch_tells_what_sixteen_bits_cost(caplog):
    backend = TorchBackend(BackendOptions(extra={"dtype": "bf16"}))
    tensor, values = made("F8_E4M3", (130, 72), "odd")
    with caplog.at_level("WARNING"):
        weights = [backend.pack([tensor], WeightRole.LINEAR) for _ in range(2)]
    (record,) = caplog.records
    assert "F8_E4M3 weights are kept as BF16, values within 0.3" in record.getMessage()
    np.testing.assert_allclose(backend.unpack(weights[0]), values, rtol=2**-8)
    told = {p.op: p.reasons for p in backend.placement()}
    assert any("2 F8_E4M3 tensors are kept as BF16" in reason for reason in told["linear"])
    assert not any("F8_E4M3" in reason for reason in told["rms_norm"])


def test_values_out_of_float16s_range_are_refused():
    tensor, _ = made("F8_E4M3", (130, 72), "odd", size=200)
    backend = TorchBackend(BackendOptions(extra={"dtype": "f16"}))
    with pytest.raises(ModelError, match="range") as caught:
        backend.pack([tensor], WeightRole.LINEAR)
    assert caught.value.code == "HRT-2412"


def test_conversions_part_what_is_exact_from_what_is_not(caplog):
    seen = Conversions()
    with caplog.at_level("INFO"):
        for error in (0.0, 1e-3, 2e-3, 1e-8):
            seen.add("A", "B", error, "why")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert seen.lines() == (
        "1 A tensors are kept as B, exactly",
        "3 A tensors are kept as B, values within 0.20% (why)",
    )
