"""Quantised weights as bit planes: what GGUF blocks become when they are packed for a GPU.

A GGUF block interleaves scales and codes, so its loads neither align nor vectorise. Here codes and
scales lie apart. Codes of 32 elements are 16 bytes: nibble i of word w holds element 4 i + w, so a
thread's 16-byte load is one block and belongs to one scale. A fifth bit lies in a plane of 32 bits
per block, the upper two bits of six in one of 64 (element order). Everything is a regrouping of
bits, so `dequantise` returns exactly what ggml computes. Int4 and int8 of Hugging Face directories
(`repack_groups`) lie the same way, with a scale per group of the file's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor

from halogen_core.spi import FORMATS


@attrs.frozen(kw_only=True)
class PlaneFormat:
    """How the kernels read a format. Value = scale * (code - offset) - min."""

    name: str
    index: int
    """The constant by which kernels branch; see `linear_kernels`."""
    high_bits: int = 0
    """Bits beyond four, in a plane of their own."""
    offset: int = 0
    e2m1: bool = False
    """Codes are 4-bit floats, sign first."""


PLANE_FORMATS = {
    f.name: f
    for f in (
        PlaneFormat(name="Q4_0", index=1, offset=8),
        PlaneFormat(name="Q5_0", index=1, offset=16, high_bits=1),
        PlaneFormat(name="Q4_1", index=2),
        PlaneFormat(name="Q5_1", index=2, high_bits=1),
        PlaneFormat(name="Q4_K", index=3),
        PlaneFormat(name="Q5_K", index=3, high_bits=1),
        PlaneFormat(name="Q6_K", index=4, offset=32, high_bits=2),
        PlaneFormat(name="Q8_0", index=5),
        PlaneFormat(name="MXFP4", index=7, e2m1=True),
        PlaneFormat(name="INT4", index=6, offset=8),
        PlaneFormat(name="W8A16", index=5),
    )
}
"""index 1: f16 scale per 32; 2: f16 (scale, min) per 32; 3: 6-bit (scale, min) per 32 under an f16
pair per 256; 4: int8 scale per 16 under an f16 per 256; 5: bytes under a scale per group; 6: scale
and zero per group; 7: exponent byte per 32."""
GROUPED = ("INT4", "W8A16")
"""Formats whose scales come apart from the codes (`QuantTensor.aux`), in groups of any size."""


@attrs.frozen(kw_only=True, eq=False)
class Planes:
    """A weight [N, K], or [E, N, K] with experts first, as bit planes."""

    format: PlaneFormat
    shape: tuple[int, ...]
    codes: Tensor
    """int32 [..., K / 8], or int8 [..., K] of Q8_0."""
    high: Tensor
    """int32 [..., K / 32 * high_bits]; `codes` where there are none."""
    scales: Tensor
    """f16 [..., K / 32 * (1 or 2)]; uint8 [..., K / 32 * 2]; int8 [..., K / 16]."""
    supers: Tensor
    """f16 [..., K / 256 * (1 or 2)]; uint8 zeros of INT4 as `scales`; `scales` where there are
    none."""
    group: int = 32
    """Elements of a row that share a scale, where a file may choose (`GROUPED`)."""
    perm: Tensor | None = None
    """int64 [K]: stored column j multiplies input perm[j]."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.codes, self.high, self.scales, self.supers

    @property
    def nbytes(self) -> int:
        """Bytes on the device, each tensor once."""
        return sum(t.nbytes for t in {id(t): t for t in self.tensors}.values())

    def replace(self, tensors: list[Tensor], shape: tuple[int, ...]) -> Planes:
        """The same planes over other tensors."""
        codes, high, scales, supers = tensors
        return attrs.evolve(self, shape=shape, codes=codes, high=high, scales=scales, supers=supers)

    def like(self, other: Planes) -> bool:
        """Whether both can be one weight: the same format, groups, zeros and order of columns."""
        own = (self.format.name, self.group, self.scales.dtype, self.supers is self.scales)
        theirs = (other.format.name, other.group, other.scales.dtype, other.supers is other.scales)
        if own != theirs or (self.perm is None) != (other.perm is None):
            return False
        return self.perm is None or other.perm is None or torch.equal(self.perm, other.perm)


def repack(name: str, raw: Tensor, shape: tuple[int, ...]) -> Planes:
    """Raw GGUF bytes (uint8, any shape) of a weight to planes, on the device of `raw`."""
    block, size = (32, 17) if name == "MXFP4" else (FORMATS[name].block, FORMATS[name].bytes)
    fmt = PLANE_FORMATS[name]
    lead = shape[:-1]
    blocks = raw.reshape(*lead, shape[-1] // block, size)
    if name == "Q8_0":
        codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(-2)
        scales = _f16(blocks[..., :2])
        return Planes(
            format=fmt, shape=shape, codes=codes, high=codes, scales=scales, supers=scales
        )
    codes = _CODES[name](blocks).reshape(*lead, shape[-1] // 32, 32)
    scales, supers = _SCALES[fmt.index](blocks)
    words = pack_words(codes)
    return Planes(
        format=fmt,
        shape=shape,
        codes=words,
        high=high_words(codes, fmt.high_bits) if fmt.high_bits else words,
        scales=scales,
        supers=scales if supers is None else supers,
    )


def repack_groups(
    name: str, raw: Tensor, shape: tuple[int, ...], aux: Mapping[str, Tensor]
) -> Planes:
    """`INT4` (two codes per byte) or `W8A16` bytes with their `aux`, groups of a multiple of 32."""
    scales = aux["scale"] if name == "INT4" else aux["scale"].unsqueeze(-1)
    group = shape[-1] // scales.shape[-1]
    if name == "INT4":
        both = raw.reshape(*shape[:-1], -1, 1)
        codes = torch.cat([both & 15, both >> 4], -1).reshape(*shape[:-1], -1, 32)
        words = pack_words(codes)
    else:
        words = raw.view(torch.int8).reshape(shape)
    supers = aux["zero"].contiguous() if "zero" in aux else None
    perm = aux["perm"].long() if "perm" in aux else None
    scales = scales.contiguous()
    return Planes(
        format=PLANE_FORMATS[name],
        shape=shape,
        codes=words,
        high=words,
        scales=scales,
        supers=scales if supers is None else supers,
        group=group,
        perm=perm,
    )


def concatenate(parts: list[Planes]) -> Planes:
    """Planes of one format stacked along the output axis."""
    axis = len(parts[0].shape) - 2
    shape = list(parts[0].shape)
    shape[axis] = sum(p.shape[axis] for p in parts)
    joined: dict[int, Tensor] = {}
    tensors = []
    for columns in zip(*(p.tensors for p in parts), strict=True):
        key = id(columns[0])
        if key not in joined:
            joined[key] = torch.cat(columns, axis)
        tensors.append(joined[key])
    return parts[0].replace(tensors, tuple(shape))


def dequantise(planes: Planes) -> Tensor:
    """float32 values [..., K] in the order of inputs, as ggml computes them."""
    fmt = planes.format
    scale, low = _scale_and_min(planes)
    if fmt.index == 5:
        codes = planes.codes.float()
    elif fmt.e2m1:
        codes = _E2M1.to(planes.codes.device)[nibbles(planes.codes).long()]
    else:
        codes = nibbles(planes.codes)
        codes = (codes | high_codes(planes) << 4 if fmt.high_bits else codes).float()
    per = codes.shape[-1] // scale.shape[-1]
    codes = codes.unflatten(-1, (-1, per))
    if fmt.index == 6:
        zero = fmt.offset if planes.supers is planes.scales else planes.supers.float()[..., None]
        return _in_order(planes, ((codes - zero) * scale[..., None]).flatten(-2))
    values = (codes - fmt.offset) * scale[..., None]
    if low is not None:
        values = values - low[..., None]
    return values.flatten(-2)


_E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _in_order(planes: Planes, values: Tensor) -> Tensor:
    if planes.perm is None:
        return values
    return torch.empty_like(values).index_copy_(-1, planes.perm, values)


def nibbles(words: Tensor) -> Tensor:
    """Codes [..., K] of int32 words [..., K / 8], in order of elements."""
    blocks = words.unflatten(-1, (-1, 4))[..., None, :]
    shifts = (4 * torch.arange(8, device=words.device, dtype=torch.int32))[:, None]
    return ((blocks >> shifts) & 15).flatten(-3)


def _scale_and_min(planes: Planes) -> tuple[Tensor, Tensor | None]:
    scales = planes.scales
    if planes.format.index in (1, 5, 6):
        return scales.float(), None
    if planes.format.index == 7:
        return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127), None
    if planes.format.index == 2:
        return scales[..., 0::2].float(), -scales[..., 1::2].float()
    supers = planes.supers.float()
    if planes.format.index == 4:
        return scales.float() * supers.repeat_interleave(16, -1), None
    scale = scales[..., 0::2].float() * supers[..., 0::2].repeat_interleave(8, -1)
    return scale, scales[..., 1::2].float() * supers[..., 1::2].repeat_interleave(8, -1)


def _f16(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16).flatten(-2)


def pack_words(codes: Tensor) -> Tensor:
    """int32 [..., K / 8] of codes [..., K / 32, 32]."""
    fields = (codes & 15).to(torch.int32).unflatten(-1, (8, 4))
    words = torch.zeros_like(fields[..., 0, :])
    for i in range(8):
        words |= fields[..., i, :] << (4 * i)
    return words.flatten(-2)


def high_words(codes: Tensor, bits: int) -> Tensor:
    """int32 [..., K / 32 * bits] of the bits above four."""
    per = 32 // bits
    upper = (codes >> 4).to(torch.int32).unflatten(-1, (bits, per))
    words = torch.zeros_like(upper[..., 0])
    for k in range(per):
        words |= upper[..., k] << (bits * k)
    return words.flatten(-2)


def high_codes(planes: Planes) -> Tensor:
    bits = planes.format.high_bits
    per = 32 // bits
    shifts = bits * torch.arange(per, device=planes.high.device, dtype=torch.int32)
    upper = (planes.high[..., None] >> shifts) & ((1 << bits) - 1)
    return upper.flatten(-2)


def _halves(qs: Tensor) -> Tensor:
    """Low nibbles of a group, then its high nibbles."""
    return torch.cat([qs & 15, qs >> 4], -1)


def _codes_4(at: int) -> Callable[[Tensor], Tensor]:
    return lambda blocks: _halves(blocks[..., at:])


def _codes_5(at: int) -> Callable[[Tensor], Tensor]:
    def codes(blocks: Tensor) -> Tensor:
        bits = blocks[..., at : at + 4].contiguous().view(torch.int32)
        shifts = torch.arange(32, device=bits.device, dtype=torch.int32)
        upper = ((bits >> shifts) & 1).to(torch.uint8)
        return _halves(blocks[..., at + 4 :]) | upper << 4

    return codes


def _codes_4_k(blocks: Tensor) -> Tensor:
    return _halves(blocks[..., 16:].unflatten(-1, (4, 32)))


def _codes_5_k(blocks: Tensor) -> Tensor:
    low = _halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32))
    shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8).reshape(4, 2, 1)
    upper = (blocks[..., None, None, 16:48] >> shifts) & 1
    return low | upper << 4


def _codes_6_k(blocks: Tensor) -> Tensor:
    ql = blocks[..., :128].unflatten(-1, (2, 2, 32))
    qh = blocks[..., None, 128:192].unflatten(-1, (2, 32)).transpose(-2, -3)
    low = torch.cat([ql & 15, ql >> 4], -2)
    shifts = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.uint8)[:, None]
    return low | ((qh >> shifts) & 3) << 4


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, min) bytes of each 32 [..., K / 256, 8, 2] and the f16 pair."""
    s = blocks[..., 4:16]
    scale = torch.cat([s[..., :4] & 63, (s[..., 8:] & 15) | (s[..., :4] >> 6) << 4], -1)
    low = torch.cat([s[..., 4:8] & 63, (s[..., 8:] >> 4) | (s[..., 4:8] >> 6) << 4], -1)
    return torch.stack([scale, low], -1).flatten(-3), _f16(blocks[..., :4])


_CODES = {
    "Q4_0": _codes_4(2),
    "Q4_1": _codes_4(4),
    "Q5_0": _codes_5(2),
    "Q5_1": _codes_5(4),
    "Q4_K": _codes_4_k,
    "Q5_K": _codes_5_k,
    "Q6_K": _codes_6_k,
    "MXFP4": _codes_4(1),
}
_SCALES = {
    1: lambda blocks: (_f16(blocks[..., :2]), None),
    2: lambda blocks: (_f16(blocks[..., :4]), None),
    3: _six_bit_scales,
    4: lambda blocks: (
        blocks[..., 192:208].contiguous().view(torch.int8).flatten(-2),
        _f16(blocks[..., 208:]),
    ),
    7: lambda blocks: (blocks[..., 0].contiguous(), None),
}
