"""Repacked GEMM against float64 over dequantised weights and quantised activations."""

import numpy as np
import pytest
from ggml_cases import backend_for, packed, quant_weight, relative, vector

from halogen_core.spi import FORMATS, WeightRole

GGML_FORMATS = [name for name, f in FORMATS.items() if f.ggml_type is not None]
FLOATS = ("F32", "F16", "BF16")


def activations(rng, rows, k):
    """Normal ones, but in a third of the blocks of 32 one element dwarfs the others or nearly so."""
    x = rng.standard_normal((rows, k), dtype=np.float32)
    blocks = x.reshape(-1, 32)
    chosen = np.flatnonzero(rng.random(len(blocks)) < 1 / 3)
    blocks[chosen, rng.integers(0, 32, len(chosen))] *= rng.choice([-9, 9, 100], len(chosen))
    return x


def quantised(x):
    """Activations as the kernels see them: int8 per 32, round to nearest even; an element more
    than 4 times as large as any other of its block as it is."""
    blocks = x.reshape(-1, 32).astype(np.float32)
    second, most = np.sort(np.abs(blocks), axis=1)[:, -2:].T[..., None]
    apart = (np.abs(blocks) == most) & (second <= most / 4) & (most > 0)
    most = np.where(apart.any(1, keepdims=True), second, most)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    codes = np.rint(np.where(apart, 0, blocks) * inverse)
    rounded = codes.astype(np.float64) * (most / np.float32(127))
    return np.where(apart, blocks, rounded).reshape(x.shape)


@pytest.mark.parametrize("fmt", GGML_FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 31])
def test_each_format_and_row_count(kernel_backend, fmt, rows):
    rng = np.random.default_rng(rows)
    tensor, w = quant_weight(rng, fmt, 40, 512)
    x = activations(rng, rows, 512)
    b = kernel_backend
    y = b.download(b.ops.linear(b.upload(x), packed(b, tensor)))
    want = (x if fmt in FLOATS else quantised(x)) @ w.T
    assert relative(y, want) < 2e-6


@pytest.mark.parametrize("fmt", ["Q4_0", "Q8_0", "Q6_K", "F16"])
def test_error_against_exact_activations_is_small(kernel_backend, fmt):
    rng = np.random.default_rng(7)
    tensor, w = quant_weight(rng, fmt, 64, 1024)
    x = rng.standard_normal((4, 1024), dtype=np.float32)
    b = kernel_backend
    y = b.download(b.ops.linear(b.upload(x), packed(b, tensor)))
    assert relative(y, x @ w.T) < 0.01


@pytest.mark.parametrize("fmt", ["Q4_1", "Q8_0", "Q5_K", "Q6_K"])
def test_an_outlier_costs_the_others_of_its_block_nothing(kernel_backend, fmt):
    """Rounded together they would be off by a 254th of the outlier, here 40 %."""
    rng = np.random.default_rng(10)
    tensor, w = quant_weight(rng, fmt, 48, 512)
    x = rng.uniform(0.5, 1, (3, 512)).astype(np.float32)
    b, weight = kernel_backend, packed(kernel_backend, tensor)
    plain = b.download(b.ops.linear(b.upload(x), weight)).astype(np.float64)
    changed = x.copy()
    changed[0, 5], changed[1, 511], changed[2, 256 + 17] = 200, -200, 1e4
    y = b.download(b.ops.linear(b.upload(changed), weight))
    want = plain + (changed.astype(np.float64) - x) @ w.T
    assert relative(y, want) < 5e-4
    assert relative(y - (changed - x).astype(np.float64) @ w.T, plain) < 0.01


def test_parts_of_different_formats_lie_side_by_side(backend):
    rng = np.random.default_rng(1)
    pieces = [quant_weight(rng, f, n, 256) for f, n in (("Q8_0", 33), ("Q4_K", 16), ("F32", 5))]
    x = rng.standard_normal((3, 256), dtype=np.float32)
    weight = packed(backend, *(t for t, _ in pieces))
    assert weight.parts == (33, 16, 5)
    y = backend.download(backend.ops.linear(backend.upload(x), weight))
    assert relative(y, x @ np.concatenate([w for _, w in pieces]).T) < 0.02


def test_bias_scale_and_softcap(backend):
    rng = np.random.default_rng(2)
    tensor, w = quant_weight(rng, "F32", 50, 96)
    x = rng.standard_normal((2, 96), dtype=np.float32)
    bias = rng.standard_normal(50).astype(np.float32)
    weight = packed(backend, tensor)
    ops, up = backend.ops, backend.upload(x)
    y = backend.download(ops.linear(up, weight, bias=vector(backend, bias, WeightRole.BIAS)))
    assert relative(y, x @ w.T + bias) < 1e-5
    y = backend.download(ops.logits(up, weight, scale=0.5, softcap=3.0))
    assert relative(y, 3 * np.tanh(x @ w.T * 0.5 / 3)) < 1e-5


def test_a_row_does_not_depend_on_its_company(kernel_backend):
    rng = np.random.default_rng(3)
    b = kernel_backend
    for fmt in ("Q4_1", "Q5_K", "Q8_0", "F16"):
        weight = packed(b, quant_weight(rng, fmt, 48, 512)[0])
        x = activations(rng, 17, 512)
        together = b.download(b.ops.linear(b.upload(x), weight))
        alone = [b.download(b.ops.linear(b.upload(x[i : i + 1]), weight)) for i in range(17)]
        np.testing.assert_array_equal(together, np.concatenate(alone))


def test_threads_do_not_change_the_result():
    rng = np.random.default_rng(4)
    tensor, _ = quant_weight(rng, "Q4_0", 320, 256)
    x = rng.standard_normal((5, 256), dtype=np.float32)
    results = []
    for threads in (1, 2, 3):
        b = backend_for("auto", threads)
        results.append(b.download(b.ops.linear(b.upload(x), packed(b, tensor))))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("fmt", GGML_FORMATS)
def test_unpack_gives_the_values_back(backend, fmt):
    tensor, w = quant_weight(np.random.default_rng(5), fmt, 3, 256)
    got = backend.unpack(packed(backend, tensor))
    np.testing.assert_allclose(got, w, rtol=1e-6, atol=1e-6)


def test_extreme_activations_stay_exact(kernel_backend):
    rng = np.random.default_rng(6)
    for fmt in ("Q4_0", "Q5_1", "Q8_0", "Q6_K"):
        tensor, w = quant_weight(rng, fmt, 32, 256)
        x = np.where(rng.random((40, 256)) < 0.5, -127, 127).astype(np.float32)
        b = kernel_backend
        y = b.download(b.ops.linear(b.upload(x), packed(b, tensor)))
        assert relative(y, x @ w.T) < 1e-5


def test_nan_and_zero_rows():
    b = backend_for("auto")
    weight = packed(b, quant_weight(np.random.default_rng(8), "Q4_0", 16, 64)[0])
    x = np.zeros((3, 64), np.float32)
    x[1, 3] = np.nan
    y = b.download(b.ops.linear(b.upload(x), weight))
    assert not y[0].any()
    assert not y[2].any()
    assert np.isnan(y[1]).all()


def test_a_nan_stays_one_through_exponentials(kernel_backend):
    """Whatever its payload is: that must not be taken for an exponent."""
    b = kernel_backend
    payloads = np.concatenate([1 << np.arange(22), [0, 127, 129, 0x3FFFFF]]).astype(np.uint32)
    x = np.zeros((len(payloads), 32), np.float32)
    x[:, 0] = (payloads | np.uint32(0x7FC00000)).view(np.float32)
    x[1::2, 0] = (payloads[1::2] | np.uint32(0xFFC00000)).view(np.float32)
    weight = packed(b, quant_weight(np.random.default_rng(11), "F32", 16, 32)[0])
    y = b.download(b.ops.logits(b.upload(x), weight, softcap=3.0))
    assert np.isnan(y).all()


def test_more_threads_than_cores_agree_over_many_steps():
    rng = np.random.default_rng(9)
    tensor, _ = quant_weight(rng, "Q8_0", 640, 256)
    x = rng.standard_normal((9, 256), dtype=np.float32)
    alone, crowd = backend_for("auto", 1), backend_for("auto", 7)
    want = alone.download(alone.ops.linear(alone.upload(x), packed(alone, tensor)))
    weight = packed(crowd, tensor)
    for _ in range(60):
        got = crowd.download(crowd.ops.linear(crowd.upload(x), weight))
        np.testing.assert_array_equal(got, want)
