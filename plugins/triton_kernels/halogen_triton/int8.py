"""W8A8 linear layers: activations are rounded per token, then int8 is multiplied with int8."""

from __future__ import annotations

import attrs
import torch
import triton
from torch import Tensor

from halogen_triton import int8_kernels as kernels
from halogen_triton.launch import Tuning


@attrs.frozen(eq=False)
class Int8:
    """A weight [N, K] of a checkpoint that wants rounded activations."""

    codes: Tensor
    """int8 [N, K]"""
    scales: Tensor
    """float32 [N]"""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


@attrs.frozen(eq=False)
class RoundedRows:
    """Activations as int8 [T, K] with a float32 scale per token [T]."""

    codes: Tensor
    scales: Tensor


def round_rows(x: Tensor, *, pdl: bool = False) -> RoundedRows:
    """Rows of x [T, K] rounded to int8, symmetric around 0, the largest of each row at 127."""
    rows, k = x.shape
    codes = torch.empty(rows, k, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(k))
    options = {"launch_pdl": True} if pdl else {}
    kernels.round_rows[(rows,)](
        x, codes, scales, k, x.stride(0), BLOCK=block, PDL=pdl, num_warps=4, **options
    )
    return RoundedRows(codes, scales)


def int8_linear(
    y: Tensor, x: RoundedRows, weight: Int8, tuning: Tuning, bias: Tensor | None
) -> None:
    """Y [T, N] = x W^T + bias."""
    rows, n = y.shape
    k = weight.shape[1]
    launch = tuning.launch("int8_gemm", m=rows, n=n, k=k)
    grid = (triton.cdiv(n, launch.block_n), triton.cdiv(rows, launch.block_m))
    kernels.int8_gemm[grid](
        x.codes, x.scales, weight.codes, weight.scales, y if bias is None else bias, y,
        rows, n, k, y.stride(0),
        BM=launch.block_m, BN=launch.block_n, BK=launch.block_k,
        BIAS=bias is not None, PDL=launch.pdl, **launch.options,
    )  # fmt: skip
