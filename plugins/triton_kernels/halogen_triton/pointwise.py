"""Host side of the small fused kernels."""

from __future__ import annotations

import math

import attrs
import torch
import triton
from torch import Tensor

from halogen_triton import pointwise_kernels as kernels
from halogen_triton.attention import HeadShape, LayerKV
from halogen_triton.interpreter import repair

repair()

ACTIVATIONS = {
    "silu": kernels.SILU.value,
    "gelu_tanh": kernels.GELU_TANH.value,
    "swiglu_oai": kernels.SWIGLU_OAI.value,
}


@attrs.frozen(kw_only=True, eq=False)
class Rotation:
    """Rotary embedding of one layer on the device."""

    turns: Tensor
    """float64 [dim / 2], turns per position."""
    dim: int
    neox: bool = True
    factor: float = 1.0


def rotation(
    inv_freq: tuple[float, ...], dim: int, *, neox: bool, factor: float, device: torch.device
) -> Rotation:
    """From frequencies in radians per position."""
    turns = torch.tensor(inv_freq, dtype=torch.float64, device=device) / (2 * math.pi)
    return Rotation(turns=turns, dim=dim, neox=neox, factor=factor)


def gated_act(x: Tensor, activation: int, *, pdl: bool = False) -> Tensor:
    """`act(x[:, :F]) * x[:, F:]` of x [T, 2F]: [T, F]."""
    rows, width = x.shape[0], x.shape[1] // 2
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        kernels.gated_act[(rows, triton.cdiv(width, block))](
            x,
            y,
            width,
            x.stride(0),
            BLOCK=block,
            KIND=activation,
            PDL=pdl,
            **launch_options(4, pdl),
        )
    return y


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """(`RMSNorm(s)`, `s`) of s = x + residual (x alone without one), rows [T, H]."""
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    if x.shape[0]:
        block = triton.next_power_of_2(x.shape[1])
        kernels.rms_norm[(x.shape[0],)](
            x, x if residual is None else residual, weight, y, total, x.shape[1], eps,
            BLOCK=block, ADD=residual is not None, PDL=pdl,
            **launch_options(row_warps(block), pdl),
        )  # fmt: skip
    return y, total


def qkv_rope_store(  # noqa: PLR0913 (one fused op of the seam)
    qkv: Tensor,
    kv: LayerKV,
    positions: Tensor,
    slots: Tensor,
    shape: HeadShape,
    rope: Rotation | None,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    pdl: bool = False,
) -> Tensor:
    """Q [T, Hq D] normed and rotated, from qkv [T, (Hq + 2 Hkv) D]; K and V go to their slots."""
    d, heads = shape.head_dim, shape.num_heads + 2 * shape.num_kv_heads
    q = torch.empty(qkv.shape[0], shape.num_heads * d, dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0] == 0:
        return q
    # many tokens: as many programs as fill a device, each with more to do than to start
    per = 4 if qkv.shape[0] < 256 else 16
    kernels.qkv_rope_store[(qkv.shape[0], triton.cdiv(heads, per))](
        qkv,
        q,
        kv.data,
        kv.data if kv.scales is None else kv.scales,
        positions,
        slots,
        positions if rope is None else rope.turns,
        q if q_norm is None else q_norm,
        q if k_norm is None else k_norm,
        1.0 if rope is None else float(rope.factor),
        eps,
        qkv.stride(0),
        HQ=shape.num_heads,
        HKV=shape.num_kv_heads,
        D=d,
        D_PAD=max(32, triton.next_power_of_2(d)),
        ROT=d if rope is None else rope.dim,
        PAGE=kv.block_size,
        BH=per,
        NEOX=rope is None or rope.neox,
        ROPE=rope is not None,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        STORE=kv.store,
        PDL=pdl,
        **launch_options(4, pdl),
    )
    return q


def row_warps(block: int) -> int:
    """Warps of a program that holds a row, `block` elements, in registers."""
    return min(max(block // 512, 1), 16)


def launch_options(warps: int, pdl: bool) -> dict[str, int | bool]:
    """Compiler options of a small kernel."""
    return {"num_warps": warps, "launch_pdl": True} if pdl else {"num_warps": warps}
