"""The oracle answers to hand-worked values and to the formats' own package."""

import ast
from pathlib import Path

import numpy as np
import pytest

import halogen_conformance
from halogen_conformance.oracle import formats, goldens
from halogen_conformance.oracle.numbers import (
    EPSILON,
    eight_bit,
    from_bf16,
    kv_bytes,
    kv_error,
    kv_values,
    round_to,
    to_bf16,
)
from halogen_conformance.oracle.scaled import (
    FLOAT8,
    LARGEST,
    SCALED,
    Layout,
    float8_values,
    nearest,
    random_scaled,
    scaled_values,
)
from halogen_core.spi import FORMATS, OPS, QuantTensor

ORACLE = Path(halogen_conformance.__file__).parent / "oracle"


@pytest.mark.parametrize("golden", goldens.GOLDENS, ids=lambda g: g.__name__)
def test_oracle_equals_hand_worked_values(golden):
    got, expected = golden()
    np.testing.assert_allclose(np.asarray(got, float), np.asarray(expected, float), rtol=1e-6)


def test_every_op_has_a_golden_value():
    names = " ".join(g.__name__ for g in goldens.GOLDENS)
    composed = {"add": "", "add_rms_norm": "rms_norm", "mlp": "silu", "select_rows": ""}
    words = {"qkv_rope_store": "rope", "gated_act": "silu", "sample": "draw"}
    for op in OPS:
        assert composed.get(op, words.get(op, op)) in names, op


def test_oracle_imports_no_backend_and_no_torch():
    for path in ORACLE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top in {
                    "__future__", "attrs", "collections", "gguf", "halogen_conformance",
                    "halogen_core", "math", "numpy", "typing",
                }, name  # fmt: skip
                assert not name.startswith("halogen_core") or name == "halogen_core.spi", name


def test_eight_bits_share_a_scale_in_blocks_of_32():
    x = np.zeros((1, 64))
    x[0, :4], x[0, 32:35] = (127.0, 1.4, -1.6, 0.4), (12.7, 0.14, -0.04)
    wanted = np.zeros((1, 64))
    wanted[0, :4], wanted[0, 32:35] = (127.0, 1.0, -2.0, 0.0), (12.7, 0.1, 0.0)
    np.testing.assert_allclose(eight_bit(x), wanted, rtol=1e-12)


def test_bf16_rounds_to_nearest_even_as_torch_does():
    import torch

    rng = np.random.default_rng(0)
    values = (rng.standard_normal(4096) * 10.0 ** rng.integers(-20, 20, 4096)).astype(np.float32)
    expected = torch.from_numpy(values).bfloat16().double().numpy()
    np.testing.assert_array_equal(round_to(values, "bf16"), expected)
    assert np.isnan(from_bf16(to_bf16(np.array([np.nan])))).all()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "f8_e5m2"])
def test_kv_rows_round_trip_within_the_error_they_declare(dtype):
    values = np.random.default_rng(1).standard_normal((3, 2, 64))
    stored = kv_values(kv_bytes(values, dtype), dtype)
    assert (np.abs(stored - values) <= kv_error(values, dtype)).all()
    assert np.abs(stored - values).max() > 0 or dtype == "f64"
    np.testing.assert_array_equal(
        kv_bytes(stored, dtype)[..., -8:], kv_bytes(values, dtype)[..., -8:]
    )


@pytest.mark.parametrize("form", FORMATS)
def test_random_weights_exercise_every_format(form):
    tensor = formats.random_tensor(np.random.default_rng(2), (6, 256), form)
    values = formats.values_of(tensor)
    assert values.shape == (6, 256)
    assert np.isfinite(values).all()
    assert 0.005 < values.std() < 0.5, values.std()
    assert len(tensor.data) == FORMATS[form].nbytes(6 * 256)


# ---------------------------------------------------------------- scales beside codes


def tensor(form, shape, data, **aux):
    return QuantTensor(format=form, shape=shape, data=np.array(data, np.uint8), aux=aux)


def test_int4_worked_out_by_hand():
    # codes 1 2 3 4 and 8 15 0 9, two groups each
    data = [0x21, 0x43, 0xF8, 0x90]
    scale = np.array([[1, 2], [0.5, 4]], np.float16)
    plain = scaled_values(tensor("INT4", (2, 4), data, scale=scale))
    np.testing.assert_array_equal(plain, [[-7, -6, -10, -8], [0, 3.5, -32, 4]])
    zero = np.array([[1, 3], [8, 0]], np.uint8)
    shifted = scaled_values(tensor("INT4", (2, 4), data, scale=scale, zero=zero))
    np.testing.assert_array_equal(shifted, [[0, 1, 0, 2], [0, 3.5, 0, 36]])
    # stored column 0 multiplies input 2, and so on
    perm = np.array([2, 0, 1, 3], np.int32)
    ordered = scaled_values(tensor("INT4", (2, 4), data, scale=scale, zero=zero, perm=perm))
    np.testing.assert_array_equal(ordered, [[1, 0, 0, 2], [3.5, 0, 0, 36]])


@pytest.mark.parametrize("form", ["W8A8", "W8A16"])
def test_int8_worked_out_by_hand(form):
    scale = np.array([[0.5], [2]], np.float32)
    got = scaled_values(tensor(form, (2, 1, 3), [1, 255, 128, 127, 0, 2], scale=scale))
    np.testing.assert_array_equal(got, [[[0.5, -0.5, -64]], [[254, 0, 4]]])


def test_mxfp4_worked_out_by_hand():
    # exponent 128 is 2; low nibbles are elements 0 to 15, high ones 16 to 31
    got = scaled_values(tensor("MXFP4", (1, 32), [128, 0x71, 0xF9, *[0] * 14]))
    np.testing.assert_array_equal(got[0, [0, 1, 16, 17, 2, 31]], [1, -1, 12, -12, 0, 0])


@pytest.mark.parametrize("form", FLOAT8)
def test_8_bit_floats_are_those_of_torch(form):
    import torch

    kind = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}[form]
    codes = np.array([c for c in range(256) if c & 127 <= LARGEST[form]], np.uint8)
    expected = torch.from_numpy(codes).view(kind).double().numpy()
    np.testing.assert_array_equal(float8_values(codes, form), expected)
    for code in {0x7F, 0xFF} if form == "F8_E4M3" else range(0x7C, 0x80):
        assert not torch.tensor([code], dtype=torch.uint8).view(kind).float().isfinite()
    values = np.random.default_rng(3).standard_normal(999) * 2.0 ** np.arange(-12, -3).repeat(111)
    rounded = torch.from_numpy(values).float().to(kind).double().numpy()
    np.testing.assert_array_equal(float8_values(nearest(values, form), form), rounded)


def test_blocks_of_8_bit_floats_may_be_cut_and_have_two_sides():
    # every code is 1; 3 rows in blocks of 2 by 4 columns, the last ones cut
    scale = np.array([[1, 2], [3, 4]], np.float32)
    block = np.array([2, 4], np.int32)
    got = scaled_values(tensor("F8_E4M3", (3, 5), [0x38] * 15, scale=scale, block=block))
    np.testing.assert_array_equal(got, [[1, 1, 1, 1, 2]] * 2 + [[3, 3, 3, 3, 4]])
    assert (scaled_values(tensor("F8_E5M2", (3, 5), [0x3C] * 15)) == 1).all()


LAYOUTS = {
    "INT4": [Layout(), Layout(groups=2, zeros=False, single=True), Layout(groups=1, shuffled=True)]
} | {
    form: [Layout(), Layout(block=(1, 0), single=True), Layout(block=None), Layout(subnormal=True)]
    for form in FLOAT8
}


@pytest.mark.parametrize("form", SCALED)
def test_random_weights_with_scales_have_the_size_asked_for(form):
    for layout in LAYOUTS.get(form, [Layout()]):
        made = random_scaled(np.random.default_rng(4), (3, 40, 256), form, layout, 0.05)
        values = scaled_values(made)
        assert values.shape == (3, 40, 256)
        assert np.isfinite(values).all()
        if layout.block is not None:
            assert 0.025 < values.std() < 0.1, (layout, values.std())
        if not layout.single and form in FLOAT8:
            # e5m2 times a small scale can leave float16's range at the lower end
            np.testing.assert_allclose(round_to(values, "f16"), values, rtol=0, atol=2.0**-25)
        elif not layout.single and form != "MXFP4":
            scale = made.aux["scale"]
            np.testing.assert_array_equal(scale.astype(np.float16), scale)


def test_epsilons_are_those_of_the_formats():
    assert EPSILON["f16"] == np.finfo(np.float16).eps / 2
    assert EPSILON["f32"] == np.finfo(np.float32).eps / 2
