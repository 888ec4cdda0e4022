"""Linear layers over tiles: picks a launch by rows and shape, and calls the kernels."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from halogen_triton import tile_kernels, tile_row_kernels
from halogen_triton.interpreter import active
from halogen_triton.launch import Rule, Tuning
from halogen_triton.tiles import CHUNK, Tiles


def tile_linear(
    y: Tensor, x: Tensor, weight: Tiles, tuning: Tuning, bias: Tensor | None, activation: int
) -> None:
    """Y [T, N] = x [T, K] W^T + bias; with `activation` W is gate over up."""
    rows, n = y.shape
    k = x.shape[1]
    rule = tile_rule(tuning, weight, rows, n, k)
    launch = rule.launch
    block_m = 8 if rows == 1 else launch.block_m
    block_n = max(launch.block_n, 32) if activation else launch.block_n
    tiles = triton.cdiv(n, block_n // 2 if activation else block_n)
    batches = triton.cdiv(rows, block_m)
    split = _split(rule, tiles * batches, weight)
    grid = (tiles, split, batches)
    parts = y
    if split > 1:
        columns = 1 if rows == 1 else block_m
        size = (tiles * batches * split, block_n, columns)
        parts = torch.empty(size, dtype=torch.float32, device=y.device)
    nvidia = not active() and x.device.type != "cpu" and torch.version.hip is None
    tile_kernels.tile_linear[grid](
        x, weight.codes, weight.high, weight.records, y if bias is None else bias,
        parts, weight.tickets, y, rows, n, k // CHUNK, x.stride(0), y.stride(0),
        BN=block_n, ONE=rows == 1, TWO=block_m > 8, SPLIT=split > 1, BIAS=bias is not None,
        GATED=activation, PDL=launch.pdl, BASE=1024 if x.dtype == torch.float16 else 128,
        ASM=nvidia, **weight.constants, **launch.options,
    )  # fmt: skip


def tile_rule(tuning: Tuning, weight: Tiles, rows: int, n: int, k: int) -> Rule:
    """How `rows` of x are multiplied; `high` and `scales` are those of `Tiles.constants`."""
    own = {name.lower(): weight.constants[name] for name in ("HIGH", "SCALES")}
    return tuning.rule("tile_gemv" if rows == 1 else "tile_gemm", m=rows, n=n, k=k, **own)


def tile_rows(ids: Tensor, weight: Tiles, y: Tensor, scale: float) -> None:
    """Y [T, K] = rows `ids` of a table, dequantised, times `scale`."""
    words = weight.codes.shape[1] * 32
    tile_row_kernels.tile_rows[(len(ids), triton.cdiv(words, 1024))](
        ids, weight.codes, weight.high, weight.records, y, weight.shape[1] // CHUNK, scale,
        **weight.constants, num_warps=4,
    )  # fmt: skip


def _split(rule: Rule, sums: int, weight: Tiles) -> int:
    """Parts of K, so that about `rule.programs` programs run; each has a few chunks at least."""
    if sums > weight.tickets.numel():
        return 1
    most = max(1, weight.shape[1] // CHUNK // 4)
    return max(1, min(rule.programs // sums, most, 16))
