"""INT4, int8 and MXFP4 weights of safetensors: re-blocked exactly or said so, against float64."""

import logging

import attrs
import numpy as np
import pytest
from ggml_cases import backend_for, experts_beside_float64, relative

from halogen_core.spi import ConfigError, OpSignature, QuantTensor, WeightRole
from halogen_cpu_ggml.reblock import ROUNDING, reblocked

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def int4(rng, shape, group=32, *, zero=True, perm=False, scale_dtype=np.float16):
    *lead, k = shape
    codes = rng.integers(0, 16, shape)
    scale = (rng.uniform(0.5, 1.5, (*lead, k // group)) / 64).astype(scale_dtype)
    zeros = rng.integers(0, 16, scale.shape) if zero else np.full(scale.shape, 8)
    values = (codes - np.repeat(zeros, group, -1)) * np.repeat(scale.astype(np.float64), group, -1)
    aux = {"scale": scale, **({"zero": zeros.astype(np.uint8)} if zero else {})}
    if perm:
        aux["perm"] = rng.permutation(k).astype(np.int32)
        values[..., aux["perm"]] = values.copy()
    data = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8).reshape(-1)
    return QuantTensor(format="INT4", shape=tuple(shape), data=data, name="w", aux=aux), values


def int8(rng, shape, form="W8A16", size=0.01, dtype=np.float32):
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    scale = (rng.uniform(0.5, 1.5, shape[:-1]) * size).astype(dtype).astype(np.float32)
    data = codes.reshape(-1).view(np.uint8)
    tensor = QuantTensor(format=form, shape=tuple(shape), data=data, name="w", aux={"scale": scale})
    return tensor, codes * scale.astype(np.float64)[..., None]


def mxfp4(rng, shape, exponents=(118, 130)):
    blocks = int(np.prod(shape)) // 32
    raw = rng.integers(0, 256, (blocks, 17), dtype=np.uint8)
    raw[:, 0] = rng.integers(*exponents, blocks)
    codes = np.concatenate([raw[:, 1:] & 15, raw[:, 1:] >> 4], 1)
    values = E2M1[codes] * 2.0 ** (raw[:, :1].astype(np.float64) - 127)
    tensor = QuantTensor(format="MXFP4", shape=tuple(shape), data=raw.reshape(-1), name="w")
    return tensor, values.reshape(shape)


CASES = {
    "int4": (int4, "Q5_0", True),
    "int4-symmetric": (lambda r, s: int4(r, s, 64, zero=False), "Q4_0", True),
    "int4-float32-scales": (lambda r, s: int4(r, s, scale_dtype=np.float32), "Q5_0", False),
    "int4-groups-of-16": (lambda r, s: int4(r, s, 16), "F32", True),
    "int8": (int8, "Q8_0", False),
    "int8-float16-scales": (lambda r, s: int8(r, s, dtype=np.float16), "Q8_0", True),
    "int8-tiny-scales": (lambda r, s: int8(r, s, "W8A8", 1e-7), "F32", True),
    "mxfp4": (mxfp4, "Q5_0", True),
    "mxfp4-extreme": (lambda r, s: mxfp4(r, s, (60, 190)), "F32", True),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_kept_exactly_or_the_error_is_told(case):
    make, form, exact = CASES[case]
    tensor, values = make(np.random.default_rng(0), (48, 128))
    b = backend_for("off")
    weight = b.pack([tensor], WeightRole.LINEAR)
    part = weight.payload.parts[0]
    assert (part.format, part.error == 0) == (form, exact)
    assert part.error <= ROUNDING
    got = b.unpack(weight).astype(np.float64)
    np.testing.assert_allclose(got, values, rtol=part.error or 2**-24, atol=0)
    line = next(r for p in b.placement() for r in p.reasons if f"{tensor.format} tensors" in r)
    assert "kept as" in line


def test_an_inexact_conversion_is_logged_once_as_a_warning(caplog):
    b = backend_for("auto", threads=1)
    b.conversions.seen.clear()
    tensor, _ = int8(np.random.default_rng(1), (16, 64))
    with caplog.at_level(logging.INFO, "halogen_core.spi"):
        for _ in range(3):
            b.pack([tensor], WeightRole.LINEAR)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "W8A16 weights are kept as Q8_0, values within 0.0" in record.getMessage()
    assert any("3 W8A16 tensors are kept as Q8_0" in r for p in b.placement() for r in p.reasons)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("case", ["int4", "int4-act-order", "int8", "mxfp4", "int8-tiny-scales"])
def test_products(backend, case, rows):
    rng = np.random.default_rng(2)
    if case == "int4-act-order":
        made = [int4(rng, (40, 128), perm=True) for _ in range(3)]
    else:
        made = [CASES[case][0](rng, (40, 128)) for _ in range(3)]
    weight = backend.pack([t for t, _ in made], WeightRole.LINEAR)
    assert backend.supports(OpSignature(op="linear", weight_format=made[0][0].format))
    x = rng.standard_normal((rows, 128), dtype=np.float32)
    got = backend.download(backend.ops.linear(backend.upload(x), weight))
    want = x.astype(np.float64) @ np.concatenate([v for _, v in made]).T
    assert relative(got, want) < (0.01 if case != "int8-tiny-scales" else 1e-5)


def test_tiles_alone_are_kept_and_still_give_the_values(kernel_backend):
    tensor, values = int4(np.random.default_rng(3), (40, 128), perm=True)
    weight = kernel_backend.pack([tensor], WeightRole.LINEAR)
    assert weight.payload.parts[0].data.size == 0
    assert weight.nbytes == 40 * 128 // 32 * 22
    got = kernel_backend.unpack(weight)
    np.testing.assert_allclose(got, values, rtol=3e-7, atol=1e-9)


def test_tiles_of_experts_give_every_experts_values(kernel_backend):
    tensor, values = int4(np.random.default_rng(5), (3, 40, 128))
    weight = kernel_backend.pack([tensor], WeightRole.EXPERTS)
    assert weight.payload.parts[0].data.size == 0
    np.testing.assert_allclose(kernel_backend.unpack(weight), values, rtol=3e-7, atol=1e-9)


def test_experts(backend):
    rng = np.random.default_rng(4)
    (gate_up, g), (down, d) = int4(rng, (4, 128, 64)), int4(rng, (4, 64, 64), zero=False)
    got, want = experts_beside_float64(backend, rng, gate_up, g, down, d)
    assert relative(got, want) < 0.02


@pytest.mark.parametrize("spoil", ["data", "scale", "zero", "perm", "no scale"])
def test_what_does_not_fit_is_refused(spoil):
    tensor, _ = int4(np.random.default_rng(5), (4, 64), perm=True)
    aux = dict(tensor.aux)
    if spoil == "data":
        tensor = attrs.evolve(tensor, data=tensor.data[:-1])
    elif spoil == "no scale":
        del aux["scale"]
    else:
        aux[spoil] = aux[spoil][..., :-1]
    with pytest.raises(ConfigError) as caught:
        reblocked(attrs.evolve(tensor, aux=aux))
    assert caught.value.code == "HRT-3610"


def test_experts_in_an_order_of_their_own_are_refused():
    tensor, _ = int4(np.random.default_rng(6), (2, 8, 64), perm=True)
    with pytest.raises(ConfigError, match="order of columns"):
        backend_for("auto").pack([tensor], WeightRole.EXPERTS)
