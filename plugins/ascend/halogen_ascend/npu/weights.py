"""Int8 weights on the real device, [K, N] in FRACTAL_NZ, split where the operator is too narrow."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from halogen_ascend.constraints import MAX_QUANT_COLUMNS
from halogen_ascend.npu import calls
from halogen_ascend.weights.dequantize import stack_int8
from halogen_core.spi import PackedWeight, QuantTensor, WeightRole


@attrs.frozen(eq=False)
class Int8Weight:
    """One weight; `pieces` are (int8 [K, n] NZ, scale [n]) side by side."""

    scheme: str
    pieces: tuple[tuple[Tensor, Tensor], ...]

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """X [T, K] times the weight: [T, N]."""
        product = calls.quantised_linear if self.scheme == "W8A8" else calls.weight_quantised_linear
        outs, start = [], 0
        for weight, scale in self.pieces:
            width = scale.shape[0]
            shift = None if bias is None else bias.narrow(0, start, width)
            outs.append(product(x, weight, scale, shift))
            start += width
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)

    def matrix(self) -> Tensor:
        """The values as [N, K] float32."""
        return torch.cat([(calls.to_nd(w).float() * s.float()).T for w, s in self.pieces])


def pack_int8(
    parts: Sequence[QuantTensor], device: torch.device, dtype: torch.dtype
) -> PackedWeight[Tensor]:
    """Stack parts along the output axis and cast them to NZ; all of one format."""
    scheme, values, scales = stack_int8(parts)
    scale_dtype = torch.float32 if scheme == "W8A8" else dtype
    width = MAX_QUANT_COLUMNS // 32 * 32
    pieces = tuple(
        (calls.to_nz(v.T.contiguous().to(device)), s.to(device, scale_dtype))
        for v, s in zip(torch.split(values, width), torch.split(scales, width), strict=True)
    )
    n, k = values.shape
    padded = -(-k // 16) * 16 * (-(-n // 32) * 32)
    return PackedWeight(
        payload=Int8Weight(scheme, pieces),
        shape=(n, k),
        nbytes=padded + 4 * n,
        format_id=f"ascend-nz/{scheme}",
        role=WeightRole.LINEAR,
        parts=tuple(p.shape[0] for p in parts) if len(parts) > 1 else (),
    )
