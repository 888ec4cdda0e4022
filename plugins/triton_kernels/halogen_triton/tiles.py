"""4-bit weights as matrix units want them: 16 rows by 128 elements in 1 KiB, scales apart.

Word j (16 bits) of a row's group of 128 holds elements j, 32 + j, 64 + j and 96 + j, low nibble
first: one nibble of 32 neighbouring words is one block of 32, in the order in which a matrix unit
takes it. Scales lie by chunks of 256 elements, then by rows. It is the bits of `Planes` in another
order; `untiled` gives those back.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from halogen_triton.planes import Planes, nibbles, pack_words

CHUNK, ROWS = 256, 16
_INDEX = {"Q4_0": 1, "Q4_1": 2, "Q4_K": 3, "INT4": 1, "MXFP4": 5}
"""By which the kernels branch; 4 is INT4 with zeros."""


@attrs.frozen(kw_only=True, eq=False)
class Tiles:
    """A weight [N, K] with N a multiple of 16 and K of 256."""

    planes: Planes
    """The same weight; its tensors are on `meta`, without storage."""
    codes: Tensor
    """int16 [N / 16, K / 128, 16, 32]"""
    scales: Tensor
    """[K / (256 span), N, per]: float16 or float32; int32 (scale, min) pairs of Q4_1; int16 pairs
    of bytes of Q4_K; uint8 exponents of MXFP4."""
    extra: Tensor
    """Of Q4_K int32 (d, dmin) pairs [K / 256, N], of INT4 with zeros uint8 as `scales`; else
    `scales`."""
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
        own = (self.codes, self.scales, self.extra, self.tickets)
        return sum(t.nbytes for t in {id(t): t for t in own}.values())

    @property
    def constants(self) -> dict[str, int]:
        """What the kernels are compiled for."""
        zeros = self.planes.format.index == 6 and self.extra is not self.scales
        return {
            "FORMAT": 4 if zeros else _INDEX[self.planes.format.name],
            "PER": self.scales.shape[-1],
            "SPAN": max(1, self.planes.group // CHUNK),
            "ZERO": self.planes.format.offset,
        }


def tileable(planes: Planes) -> bool:
    """Whether a weight has the sizes for it."""
    if planes.format.name not in _INDEX or len(planes.shape) != 2:
        return False
    n, k = planes.shape
    even = CHUNK % planes.group == 0 or planes.group % CHUNK == 0
    return n % ROWS == 0 and k % CHUNK == 0 and even


def tiled(planes: Planes) -> Tiles:
    """Planes that are `tileable`, in the order of tiles."""
    n, k = planes.shape
    codes = nibbles(planes.codes).view(n // ROWS, ROWS, k // 128, 4, 32)
    packed = codes[..., 0, :].clone()
    for i in range(1, 4):
        packed |= codes[..., i, :] << (4 * i)
    scales, extra = _records(planes)
    return Tiles(
        planes=_shell(planes),
        codes=packed.to(torch.int16).transpose(1, 2).contiguous(),
        scales=scales,
        extra=scales if extra is None else extra,
        tickets=torch.zeros(n // 4, dtype=torch.int32, device=scales.device),
    )


def untiled(tiles: Tiles) -> Planes:
    """The planes that tiles were made of."""
    n, k = tiles.shape
    packed = tiles.codes.transpose(1, 2).reshape(n, k // 128, 1, 32).to(torch.int32)
    shifts = (4 * torch.arange(4, device=packed.device, dtype=torch.int32)).view(4, 1)
    codes = pack_words(((packed >> shifts) & 15).view(n, k // 32, 32))
    scales = _rows_first(tiles.scales).view(tiles.planes.scales.dtype)
    supers = scales
    if tiles.extra is not tiles.scales:
        flat = tiles.extra if tiles.extra.dim() == 3 else tiles.extra.unsqueeze(-1)
        supers = _rows_first(flat).view(tiles.planes.supers.dtype)
    return tiles.planes.replace([codes, codes, scales, supers], (n, k))


def _shell(planes: Planes) -> Planes:
    held = {id(t): t.to("meta") for t in planes.tensors}
    return planes.replace([held[id(t)] for t in planes.tensors], planes.shape)


def _records(planes: Planes) -> tuple[Tensor, Tensor | None]:
    """Scales [K / (256 span), N, per] and what comes with them."""
    chunks = max(1, planes.shape[1] // max(CHUNK, planes.group))
    if planes.format.index == 2:
        return _chunks_first(planes.scales.view(torch.int32), chunks), None
    if planes.format.index == 3:
        tops = planes.supers.view(torch.int32)
        return _chunks_first(planes.scales.view(torch.int16), chunks), tops.T.contiguous()
    scales = _chunks_first(planes.scales, chunks)
    if planes.supers is planes.scales:
        return scales, None
    return scales, _chunks_first(planes.supers, chunks)


def _chunks_first(rows: Tensor, chunks: int) -> Tensor:
    return rows.view(len(rows), chunks, -1).transpose(0, 1).contiguous()


def _rows_first(records: Tensor) -> Tensor:
    return records.transpose(0, 1).flatten(1).contiguous()
