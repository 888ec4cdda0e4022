"""Formats with scales beside their codes, to float32: INT4, int8, fp8; and MXFP4's blocks.

What `aux` holds say `halogen_core.loader.quantised` and `halogen_core.spi.float8`. Activations
before W8A8 and fp8 are not rounded here: more exact than asked.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import torch
from torch import Tensor

from halogen_core.spi.float8 import FLOAT8, float8_values
from halogen_core.spi.operations import QuantTensor

_MXFP4_BYTES = 17
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def values(part: QuantTensor, start: int, stop: int) -> Tensor:
    """Rows start to stop of [rows, K] (experts one after another), float32."""
    codes = part.data.reshape(prod(part.shape[:-1]), -1)[start:stop]
    return READERS[part.format](part, torch.from_numpy(np.ascontiguousarray(codes)), start)


def _int4(part: QuantTensor, pairs: Tensor, start: int) -> Tensor:
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1).float()
    scale = _rows(part, "scale", start, len(codes)).unsqueeze(-1)
    zero = _rows(part, "zero", start, len(codes)).unsqueeze(-1) if "zero" in part.aux else 8
    grouped = codes.view(len(codes), scale.shape[1], -1)
    found = ((grouped - zero) * scale).flatten(1)
    if "perm" not in part.aux:
        return found
    out = torch.empty_like(found)
    out[:, torch.from_numpy(np.asarray(part.aux["perm"], np.int64))] = found
    return out


def _int8(part: QuantTensor, codes: Tensor, start: int) -> Tensor:
    return codes.view(torch.int8).float() * _rows(part, "scale", start, len(codes))


def _mxfp4(part: QuantTensor, rows: Tensor, start: int) -> Tensor:
    blocks = rows.view(-1, _MXFP4_BYTES)
    pairs = blocks[:, 1:]
    codes = torch.cat((pairs & 15, pairs >> 4), 1).long()
    scale = torch.exp2(blocks[:, :1].double() - 127)
    return (torch.tensor(_E2M1, dtype=torch.float64)[codes] * scale).float().view(len(rows), -1)


def _float8(part: QuantTensor, codes: Tensor, start: int) -> Tensor:
    return torch.from_numpy(float8_values(part, start, start + len(codes)))


def _rows(part: QuantTensor, key: str, start: int, count: int) -> Tensor:
    table = part.aux[key].reshape(prod(part.shape[:-1]), -1)[start : start + count]
    return torch.from_numpy(np.ascontiguousarray(table, np.float32))


READERS: dict[str, Callable[[QuantTensor, Tensor, int], Tensor]] = {
    "INT4": _int4,
    "W8A8": _int8,
    "W8A16": _int8,
    "MXFP4": _mxfp4,
    **dict.fromkeys(FLOAT8, _float8),
}
