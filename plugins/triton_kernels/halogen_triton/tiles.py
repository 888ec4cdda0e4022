"""Packed weights as matrix units want them: tiles of 16 rows, scales beside them.

A word (16 bits) of 4-bit codes holds elements j, 32 + j, 64 + j and 96 + j of a row's group of 128,
low nibble first: one nibble of 32 neighbouring words is one block of 32, in the order in which a
matrix unit takes it. A word of bytes holds j and 32 + j of 64. Scales of 16 elements (Q6_K) want
blocks of 16: word 16 g + j holds elements 16 (4 g + i) + j of 128. High bits lie in words of their
own, bit for bit in the order of codes. What a chunk of 256 elements needs for its scales is a
record of 16-bit fields. It is the bits of `Planes` in another order; `untiled` gives those back.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from halogen_triton.planes import Planes, high_codes, high_words, nibbles, pack_words

CHUNK, ROWS = 256, 16
_SCALES = {1: 1, 2: 2, 3: 3, 4: 6, 5: 1, 6: 1, 7: 5}
"""Kind of record by `PlaneFormat.index`; 4 is INT4 with zeros."""
_FIELDS = 16


@attrs.frozen(kw_only=True, eq=False)
class Tiles:
    """A weight [N, K] with N a multiple of 16 and K of 256."""

    planes: Planes
    """The same weight; its tensors are on `meta`, without storage."""
    codes: Tensor
    """int16 [N / 16, K / 128, 16, 32]; of bytes [N / 16, K / 64, 16, 32]"""
    high: Tensor
    """int16 [N / 16, K / 256, 16, 32] of two bits, [N / 16, K / 512, 16, 32] of one; else
    `codes`."""
    records: Tensor
    """int16 [N / 16, K / (256 span), fields, 16]: scales, then what comes with them."""
    tickets: Tensor
    """int32, zero between launches: how many parts of a split product have arrived, per tile."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.planes.shape

    @property
    def perm(self) -> Tensor | None:
        """See `Planes`."""
        return self.planes.perm

    @property
    def nbytes(self) -> int:
        """Bytes on the device, each tensor once."""
        own = (self.codes, self.high, self.records, self.tickets)
        return sum(t.nbytes for t in {id(t): t for t in own}.values())

    @property
    def constants(self) -> dict[str, int]:
        """What the kernels are compiled for.

        SCALES: 1 scale, 2 (scale, minimum), 3 6-bit pairs under (d, dmin), 4 scale and zero,
        5 exponents, 6 signed bytes per 16 under d. PER scales per 256 elements, each in PARTS
        fields; a record of FIELDS for SPAN chunks of 256.
        """
        fmt = self.planes.format
        return {
            "SCALES": 4 if _has_zeros(self.planes) else _SCALES[fmt.index],
            "PER": _per(self.planes),
            "PARTS": _parts(self.planes),
            "FIELDS": self.records.shape[2],
            "SPAN": max(1, self.planes.group // CHUNK),
            "HIGH": 4 if fmt.index == 5 else fmt.high_bits,
            "ZERO": 0 if _has_zeros(self.planes) or fmt.e2m1 else fmt.offset,
        }


def tileable(planes: Planes) -> bool:
    """Whether a weight has the sizes for it."""
    if len(planes.shape) != 2:
        return False
    n, k = planes.shape
    even = CHUNK % planes.group == 0 or planes.group % CHUNK == 0
    return n % ROWS == 0 and k % CHUNK == 0 and even and fields_of(planes) <= _FIELDS


def tiled(planes: Planes) -> Tiles:
    """Planes that are `tileable`, in the order of tiles."""
    n, k = planes.shape
    records = _records(planes)
    if planes.format.index == 5:
        both = planes.codes.view(torch.uint8).view(n // ROWS, ROWS, k // 64, 2, 32)
        codes = high = _by_tile(_word(both, 8))
    else:
        codes = high = _by_tile(_word(_arranged(nibbles(planes.codes), planes), 4))
        if planes.format.high_bits:
            high = _by_tile(_high(planes))
    tickets = torch.zeros(n // 4, dtype=torch.int32, device=records.device)
    return Tiles(planes=_shell(planes), codes=codes, high=high, records=records, tickets=tickets)


def untiled(tiles: Tiles) -> Planes:
    """The planes that tiles were made of."""
    n, k = tiles.shape
    planes = tiles.planes
    bits = 8 if planes.format.index == 5 else 4
    codes = _fields(tiles.codes.transpose(1, 2), bits)
    if bits == 8:
        words = high = codes.to(torch.uint8).view(torch.int8).reshape(n, k)
    else:
        words = high = pack_words(_in_order(codes, planes).view(n, k // 32, 32))
        if planes.format.high_bits:
            high = high_words(_high_in_order(tiles).view(n, k // 32, 32), planes.format.high_bits)
    scales, supers = _scales(tiles)
    return planes.replace([words, high, scales, scales if supers is None else supers], (n, k))


def fields_of(planes: Planes) -> int:
    """Fields of 16 bits that a record has."""
    kind, per = planes.format.index, _per(planes)
    if kind in (2, 3, 4, 7):
        return {2: 16, 3: 10, 4: 9, 7: 4}[kind]
    return _parts(planes) * per + (-(-per // 2) if _has_zeros(planes) else 0)


def _has_zeros(planes: Planes) -> bool:
    return planes.format.index == 6 and planes.supers is not planes.scales


def _per(planes: Planes) -> int:
    return max(1, CHUNK // planes.group)


def _parts(planes: Planes) -> int:
    """Fields of a scale: float32 is the sum of three bfloat16."""
    return 3 if planes.scales.dtype == torch.float32 else 1


def _shell(planes: Planes) -> Planes:
    held = {id(t): t.to("meta") for t in planes.tensors}
    return planes.replace([held[id(t)] for t in planes.tensors], planes.shape)


def _by_tile(words: Tensor) -> Tensor:
    """[N / 16, groups, 16, 32] of words [N / 16, 16, groups, 32]."""
    return words.transpose(1, 2).contiguous()


def _word(codes: Tensor, bits: int) -> Tensor:
    """int16 words of codes [..., 16 / bits, 32]: code i at bit `bits` i."""
    words = torch.zeros_like(codes[..., 0, :], dtype=torch.int32)
    for i in range(16 // bits):
        words |= codes[..., i, :].int() << (bits * i)
    return words.to(torch.int16)


def _fields(words: Tensor, bits: int) -> Tensor:
    """int32 codes [..., 16 / bits, 32] of words."""
    count = 16 // bits
    shifts = bits * torch.arange(count, device=words.device, dtype=torch.int32)
    return (words.to(torch.int32)[..., None, :] >> shifts[:, None]) & ((1 << bits) - 1)


def _arranged(codes: Tensor, planes: Planes) -> Tensor:
    """[N / 16, 16, K / 128, 4, 32] of codes [N, K]: which four a word has."""
    n, k = planes.shape
    if planes.format.index != 4:
        return codes.view(n // ROWS, ROWS, k // 128, 4, 32)
    blocks = codes.view(n // ROWS, ROWS, k // 128, 2, 4, 16)
    return blocks.transpose(-2, -3).reshape(n // ROWS, ROWS, k // 128, 4, 32)


def _in_order(codes: Tensor, planes: Planes) -> Tensor:
    """Codes [N, K] of `_arranged` ones."""
    n, k = planes.shape
    if planes.format.index == 4:
        codes = codes.reshape(*codes.shape[:-2], 4, 2, 16).transpose(-2, -3)
    return codes.reshape(n, k)


def _high(planes: Planes) -> Tensor:
    """Words [N / 16, 16, words, 32] of high bits."""
    bits = planes.format.high_bits
    arranged = _arranged(high_codes(planes), planes)
    missing = -arranged.shape[2] % (4 // bits)
    arranged = pad(arranged, (0, 0, 0, 0, 0, missing))
    return _word(arranged.reshape(*arranged.shape[:2], -1, 16 // bits, 32), bits)


def _high_in_order(tiles: Tiles) -> Tensor:
    """Upper bits [N, K], at bit 4."""
    n, k = tiles.shape
    fields = _fields(tiles.high.transpose(1, 2), tiles.planes.format.high_bits)
    groups = fields.reshape(n // ROWS, ROWS, -1, 4, 32)[:, :, : k // 128]
    return _in_order(groups, tiles.planes) << 4


def _records(planes: Planes) -> Tensor:
    """int16 [N / 16, K / (256 span), fields, 16]."""
    n, k = planes.shape
    chunks = k // max(CHUNK, planes.group)
    scales = planes.scales
    if _parts(planes) == 3:
        fields = [part.view(torch.int16).view(n, chunks, -1) for part in _three(scales)]
    else:
        fields = [scales.view(torch.int16).view(n, chunks, -1)]
    if planes.format.index == 2:
        fields = [fields[0][..., 0::2], fields[0][..., 1::2]]
    if _has_zeros(planes):
        zeros = planes.supers.view(n, chunks, -1)
        fields.append(pad(zeros, (0, zeros.shape[2] % 2)).view(torch.int16))
    elif planes.supers is not scales:
        fields.append(planes.supers.view(torch.int16).view(n, chunks, -1))
    joined = torch.cat(fields, -1)
    return joined.view(n // ROWS, ROWS, chunks, -1).permute(0, 2, 3, 1).contiguous()


def _three(scales: Tensor) -> list[Tensor]:
    """bfloat16 parts whose sum is exact."""
    parts, rest = [], scales
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return parts


def _scales(tiles: Tiles) -> tuple[Tensor, Tensor | None]:
    """Scales and what comes with them, as planes have them."""
    planes, records = tiles.planes, tiles.records
    n = planes.shape[0]
    fields = records.permute(0, 3, 1, 2).reshape(n, records.shape[1], records.shape[2])
    own = planes.scales.shape[1] * planes.scales.element_size() // (2 * records.shape[1])
    if _parts(planes) == 3:
        own = 3 * _per(planes)
        three = fields[..., :own].contiguous().view(torch.bfloat16).float()
        scales = three.unflatten(-1, (3, -1)).sum(-2).flatten(1)
    elif planes.format.index == 2:
        pairs = torch.stack([fields[..., :8], fields[..., 8:]], -1)
        return pairs.flatten(1).view(planes.scales.dtype), None
    else:
        scales = fields[..., :own].flatten(1).contiguous().view(planes.scales.dtype)
    if planes.supers is planes.scales:
        return scales, None
    rest = fields[..., own:].contiguous().view(planes.supers.dtype)
    per = planes.supers.shape[1] // records.shape[1]
    return scales, rest[..., :per].flatten(1).contiguous()
