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
from halogen_core.spi import FORMATS, OPS

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


def test_epsilons_are_those_of_the_formats():
    assert EPSILON["f16"] == np.finfo(np.float16).eps / 2
    assert EPSILON["f32"] == np.finfo(np.float32).eps / 2
