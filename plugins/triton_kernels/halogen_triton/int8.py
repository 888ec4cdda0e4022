"""W8A8 linear layers: activations are rounded per token, then int8 is multiplied with int8.

Norms and gated activations round what they make themselves: the same codes as `round_rows` of it.
"""

from __future__ import annotations

import attrs
import torch
import triton
from torch import Tensor

from halogen_triton import int8_kernels as kernels
from halogen_triton.launch import Tuning
from halogen_triton.pointwise import gated_act, launch_options, row_warps

_WIDEST = 32768
"""Elements of a row that one program holds in registers."""


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
    dtype: torch.dtype
    """What was rounded, and what is computed from it."""
    exact: Tensor | None = None
    """What was rounded [T, K], where another op than a W8A8 product may take it."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @classmethod
    def like(cls, x: Tensor, width: int, *, exact: Tensor | None = None) -> RoundedRows:
        """Room for rows of `width` made of rows of x."""
        rows = x.shape[0]
        codes = torch.empty(rows, width, dtype=torch.int8, device=x.device)
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        return cls(codes, scales, x.dtype, exact)


def round_rows(x: Tensor, *, pdl: bool = False) -> RoundedRows:
    """Rows of x [T, K] rounded to int8, symmetric around 0, the largest of each row at 127."""
    rows, k = x.shape
    made = RoundedRows.like(x, k)
    if rows:
        block, options = min(4096, triton.next_power_of_2(k)), launch_options(4, pdl)
        kernels.round_rows[(rows,)](
            x, made.codes, made.scales, k, x.stride(0), BLOCK=block, PDL=pdl, **options
        )
    return made


def rms_norm_rounded(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, pdl: bool = False
) -> tuple[RoundedRows, Tensor]:
    """`pointwise.rms_norm` whose first result is rounded too (its `exact` is that result)."""
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    made = RoundedRows.like(x, x.shape[1], exact=y)
    if x.shape[0]:
        block = triton.next_power_of_2(x.shape[1])
        kernels.rms_norm_rounded[(x.shape[0],)](
            x, x if residual is None else residual, weight, y, total, made.codes, made.scales,
            x.shape[1], eps,
            BLOCK=block, ADD=residual is not None, PDL=pdl, **launch_options(row_warps(block), pdl),
        )  # fmt: skip
    return made, total


def gated_rounded(x: Tensor, activation: int, *, pdl: bool = False) -> RoundedRows:
    """Rounded rows [T, F] of `pointwise.gated_act` of x [T, 2F], which are not kept."""
    rows, width = x.shape[0], x.shape[1] // 2
    if width > _WIDEST:
        return round_rows(gated_act(x, activation, pdl=pdl), pdl=pdl)
    made = RoundedRows.like(x, width)
    if rows:
        block = triton.next_power_of_2(width)
        kernels.gated_rounded[(rows,)](
            x, made.codes, made.scales, width, x.stride(0),
            BLOCK=block, KIND=activation, PDL=pdl, **launch_options(row_warps(block), pdl),
        )  # fmt: skip
    return made


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
