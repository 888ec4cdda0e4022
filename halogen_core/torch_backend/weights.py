"""Weights on a torch device: dequantised matrices, and embedding rows kept as stored."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod

import attrs
import numpy as np
import torch
from torch import Tensor

from halogen_core.spi.arrays import Bytes
from halogen_core.spi.operations import PackedWeight, QuantTensor, WeightRole
from halogen_core.spi.weight_check import check_weight
from halogen_core.torch_backend import scaled
from halogen_core.torch_backend.dequant import DENSE_DTYPES, dequantize

_SLAB = 1 << 22
"""Elements dequantised at once, so that a big weight needs no second float32 copy."""


@attrs.frozen(eq=False)
class StoredRows:
    """An embedding table in its stored format; rows are dequantised when looked up."""

    rows: Tensor
    """uint8 [V, row bytes]"""
    format: str
    source: Bytes
    """The host bytes; kept so that their address stays theirs."""

    def look_up(self, index: Tensor) -> Tensor:
        """Rows `index` [T] as float32 [T, H]."""
        return dequantize(self.rows.index_select(0, index), self.format)


def host_bytes(data: Bytes) -> Tensor:
    """A uint8 tensor over the same memory (often a read-only map of the model file)."""
    with warnings.catch_warnings():
        # weights are never written; torch only warns that it could not stop us
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(data))


def stored_rows(part: QuantTensor, device: torch.device) -> StoredRows:
    """A table [V, H] as it is in the file."""
    check_weight(part)
    rows = host_bytes(part.data).view(part.shape[0], -1).to(device)
    return StoredRows(rows, part.format, part.data)


def dense(part: QuantTensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor's values in `dtype`; a view of the file where format, dtype and device allow."""
    check_weight(part)
    if part.format in DENSE_DTYPES:
        data = host_bytes(part.data)
        return data.view(DENSE_DTYPES[part.format]).view(part.shape).to(device, dtype)
    rows = prod(part.shape[:-1])
    values = torch.empty((rows, part.shape[-1]), dtype=dtype, device=device)
    step = max(1, _SLAB // part.shape[-1])
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        values[start:stop] = _slab(part, start, stop, device)
    return values.view(part.shape)


def _slab(part: QuantTensor, start: int, stop: int, device: torch.device) -> Tensor:
    """Rows start to stop of [rows, K] float32."""
    if part.format in scaled.READERS:
        return scaled.values(part, start, stop).to(device)
    rows = host_bytes(part.data).view(prod(part.shape[:-1]), -1)[start:stop]
    return dequantize(rows.to(device), part.format)


def stack(
    parts: Sequence[QuantTensor], role: WeightRole, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Parts stacked along their output axis (the one before the last, or the only one)."""
    tensors = [dense(part, dtype, device) for part in parts]
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors, dim=1 if role is WeightRole.EXPERTS else 0)


def packed(
    payload: Tensor | StoredRows, parts: Sequence[QuantTensor], role: WeightRole
) -> PackedWeight[Tensor]:
    """The record around a payload."""
    axis = 1 if role is WeightRole.EXPERTS else 0
    sizes = tuple(part.shape[axis] for part in parts)
    shape = list(parts[0].shape)
    shape[axis] = sum(sizes)
    stored = isinstance(payload, StoredRows)
    data = payload.rows if isinstance(payload, StoredRows) else payload
    kind = payload.format if isinstance(payload, StoredRows) else str(payload.dtype)
    return PackedWeight(
        payload=payload,
        shape=tuple(shape),
        nbytes=data.nbytes,
        format_id=f"torch/{'rows' if stored else 'dense'}/{kind.removeprefix('torch.')}",
        role=role,
        parts=sizes,
    )
