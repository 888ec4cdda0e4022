"""Dequantisation is bit-identical to the numpy package `gguf` for every format."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from halogen_core.spi import FORMATS, UnsupportedOp
from halogen_core.torch_backend.dequant import dequantize, quantize_q8_0

QUANTISED = [name for name in FORMATS if name != "F32"]


def random_blocks(name, rows, per_row, seed):
    """Random bytes whose float16 scales are finite."""
    form = FORMATS[name]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows * per_row, form.bytes), dtype=np.uint8)
    scale_at = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
    scale_at |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    for at in scale_at.get(name, []):
        scales = rng.normal(size=len(data)).astype(np.float16)
        data[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", QUANTISED)
def test_bit_identical_to_gguf(name):
    data = random_blocks(name, 5, 7, seed=1)
    want = quants.dequantize(data, GGMLQuantizationType[name]).astype(np.float32)
    got = dequantize(torch.from_numpy(data), name).numpy()
    assert got.shape == want.shape
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_views_and_empty_rows():
    data = torch.from_numpy(random_blocks("Q6_K", 6, 2, seed=2))
    assert torch.equal(dequantize(data[1::2], "Q6_K"), dequantize(data, "Q6_K")[1::2])
    assert dequantize(data[:0], "Q6_K").shape == (0, 512)


def test_q8_0_rows_equal_ggml_rounding():
    rng = np.random.default_rng(3)
    values = rng.normal(size=(9, 96)).astype(np.float32)
    values[2] = 0
    values[3, :32] = np.arange(32) / 2 - 7.75
    want = quants.quantize(values, GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(quantize_q8_0(torch.from_numpy(values)).numpy(), want)


def test_unknown_format_is_named():
    with pytest.raises(UnsupportedOp, match="Q9_X"):
        dequantize(torch.zeros(1, 4, dtype=torch.uint8), "Q9_X")
