"""Weight formats in torch: bytes to float32, bit-identical to ggml's reference.

Block layouts and the order of every rounding follow ggml-quants.c (the numpy package `gguf` is the
test oracle). All functions take blocks [n, bytes] uint8 and return values [n, block] float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halogen_core.errors import UnsupportedOp
from halogen_core.spi.formats import FORMATS

DENSE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Formats whose bytes are plain elements."""


def dequantize(data: Tensor, name: str) -> Tensor:
    """Values of uint8 rows [..., row bytes] in format `name`: float32 [..., elements]."""
    if name in DENSE_DTYPES:
        return data.view(DENSE_DTYPES[name]).float()
    form = FORMATS.get(name)
    if form is None or name not in _BLOCKS:
        raise UnsupportedOp(f"weight format `{name}` is unknown; known are {', '.join(FORMATS)}")
    values = _BLOCKS[name](data.reshape(-1, form.bytes))
    return values.reshape(*data.shape[:-1], data.shape[-1] // form.bytes * form.block)


def quantize_q8_0(values: Tensor) -> Tensor:
    """Rows [..., K] float32 as q8_0 bytes [..., K / 32 * 34], bit-identical to ggml."""
    blocks = values.reshape(-1, 32)
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    inverse = torch.where(scale == 0, torch.zeros_like(scale), scale.reciprocal())
    scaled = blocks * inverse
    # roundf: halves away from zero, unlike torch.round
    codes = torch.sign(scaled) * torch.floor(scaled.abs() + 0.5)
    packed = torch.cat((_bytes_of(scale.half()), _bytes_of(codes.to(torch.int8))), dim=1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // 32 * 34)


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _bits(codes: Tensor, width: int, count: int, run: int) -> Tensor:
    """Fields of `width` bits: a run of `run` bytes gives `count` runs of values, low bits first."""
    shifts = torch.arange(0, width * count, width, dtype=torch.uint8, device=codes.device)
    rows, size = codes.shape
    fields = codes.reshape(rows, size // run, 1, run) >> shifts.view(1, 1, count, 1)
    return (fields & ((1 << width) - 1)).reshape(rows, size * count)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """32 single bits from the 4 bytes at `at`, in element order: [n, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, at : at + 4, None] >> shifts) & 1).reshape(len(blocks), 32)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_bits(blocks[:, 2:], 4, 2, 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _bits(blocks[:, 4:], 4, 2, 16).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _bits(blocks[:, 6:], 4, 2, 16) | (_fifth_bits(blocks, 2) << 4)
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _bits(blocks[:, 8:], 4, 2, 16) | (_fifth_bits(blocks, 4) << 4)
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the 8 sub-blocks of Q4_K and Q5_K: float32 [n, 8, 1] each."""
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 0x3F, (mixed & 0x0F) | ((low >> 2) & 0x30)), dim=1)
    minima = torch.cat((high & 0x3F, (mixed >> 4) | ((high >> 2) & 0x30)), dim=1)
    scale, minimum = _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()
    return scale.unsqueeze(2), minimum.unsqueeze(2)


def _q4_k(blocks: Tensor) -> Tensor:
    scale, minimum = _k_scales(blocks)
    codes = _bits(blocks[:, 16:], 4, 2, 32).view(-1, 8, 32)
    return (scale * codes.float() - minimum).view(-1, 256)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, minimum = _k_scales(blocks)
    low, fifth = _bits(blocks[:, 48:], 4, 2, 32), _bits(blocks[:, 16:48], 1, 8, 32)
    codes = (low | (fifth << 4)).view(-1, 8, 32)
    return (scale * codes.float() - minimum).view(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    low, high = _bits(blocks[:, :128], 4, 2, 64), _bits(blocks[:, 128:192], 2, 4, 32)
    codes = (low | (high << 4)).float() - 32
    return (scale.unsqueeze(2) * codes.view(-1, 16, 16)).view(-1, 256)


_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
