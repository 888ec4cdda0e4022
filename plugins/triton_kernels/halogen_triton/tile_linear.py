"""Linear layers over tiles: picks a launch by rows and shape, and calls the kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from halogen_triton import tile_kernels as kernels
from halogen_triton.interpreter import active
from halogen_triton.launch import Launch, Rule, Tuning
from halogen_triton.tiles import CHUNK, Tiles

_BASE = {torch.bfloat16: 128, torch.float16: 1024}
"""What codes are multiplied as: this and the code, exact in a mantissa."""


def tile_linear(
    y: Tensor, x: Tensor, weight: Tiles, tuning: Tuning, bias: Tensor | None, activation: int
) -> None:
    """Y [T, N] = x [T, K] W^T + bias; with `activation` (one row only) W is gate over up."""
    rows, n = y.shape
    k = x.shape[1]
    kind = "tile_gemv" if rows == 1 else "tile_gemm"
    rule = tuning.rule(kind, m=rows, n=n, k=k)
    launch = rule.launch
    tiles = triton.cdiv(n, launch.block_n)
    split = _split(rule, tiles, k)
    parts = y
    if split > 1:
        parts = torch.empty(split, rows, weight.shape[0], dtype=torch.float32, device=y.device)
    pointers = (
        x, weight.codes, weight.scales, weight.extra, y if bias is None else bias,
        parts, weight.tickets, y,
    )  # fmt: skip
    sizes = (n, weight.shape[0], k // CHUNK)
    flags = {**weight.constants, **_flags(launch, split, bias is not None, x)}
    flags["BASE"] = 0 if weight.planes.format.e2m1 else _BASE.get(x.dtype, 0)
    if rows == 1:
        kernels.tile_gemv[(tiles, split)](
            *pointers, *sizes, triton.cdiv(k // CHUNK, split), GATED=activation, **flags
        )
        return
    grid = (tiles, split, triton.cdiv(rows, launch.block_m))
    steps = triton.cdiv(k // 128, split)
    kernels.tile_gemm[grid](
        *pointers, rows, *sizes, steps, x.stride(0), y.stride(0), BM=launch.block_m, **flags
    )


def tile_rows(ids: Tensor, weight: Tiles, y: Tensor, scale: float) -> None:
    """Y [T, K] = rows `ids` of a table, dequantised, times `scale`."""
    chunks = weight.shape[1] // CHUNK
    kernels.tile_rows[(len(ids), triton.cdiv(chunks, 4))](
        ids, weight.codes, weight.scales, weight.extra, y, weight.shape[0], chunks, scale,
        **weight.constants, num_warps=1,
    )  # fmt: skip


def _split(rule: Rule, tiles: int, k: int) -> int:
    """Parts of K, so that about `rule.programs` programs run; each has a few chunks at least."""
    most = max(1, k // CHUNK // 4)
    return max(1, min(rule.programs // tiles, most, 16))


def _flags(launch: Launch, split: int, biased: bool, x: Tensor) -> dict[str, Any]:
    nvidia = not active() and x.device.type != "cpu" and torch.version.hip is None
    return {
        "BN": launch.block_n,
        "SPLIT": split,
        "BIAS": biased,
        "PDL": launch.pdl,
        "ASM": nvidia,
        **launch.options,
    }
