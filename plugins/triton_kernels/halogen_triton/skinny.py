"""Dense linear layers of a decode step: which kernel, launched how."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from halogen_triton import skinny_kernels as kernels
from halogen_triton.interpreter import repair
from halogen_triton.launch import Rule, Tuning

repair()

_MOST_PARTS = 8


def skinny_rule(weight: object, tuning: Tuning, rows: int, n: int) -> Rule | None:
    """The rule for 2 or more `rows` of a dense weight, n results each; None: another kernel."""
    if not isinstance(weight, Tensor) or rows < 2 or "dense_skinny" not in tuning.rules:
        return None
    shape = {"m": rows, "n": n, "k": weight.shape[-1], "bytes": weight.element_size()}
    rule = tuning.rule("dense_skinny", **shape)
    return None if rule.library or rows > rule.launch.block_m else rule


def one_row(
    x: Tensor, weight: Tensor, tuning: Tuning, bias: Tensor | None, activation: int, y: Tensor
) -> None:
    """X [1, K] through weight [N, K] into y [1, N]; see `linear.linear`."""
    n, k = y.shape[1], weight.shape[-1]
    launch = tuning.launch("dense_gemv", n=n, k=k)
    kernels.dense_gemv[(triton.cdiv(n, launch.block_n),)](
        x, weight, y if bias is None else bias, y, n, k,
        BN=launch.block_n,
        BK=launch.block_k,
        BIAS=bias is not None,
        GATED=activation,
        PDL=launch.pdl,
        **launch.options,
    )  # fmt: skip


def few_rows(
    x: Tensor,
    weight: Tensor,
    rule: Rule,
    bias: Tensor | None,
    activation: int,
    y: Tensor,
    joins: Tensor | None,
) -> None:
    """X [M, K] through weight [N, K] into y [M, N], by a rule of `skinny_rule`.

    Where tiles of N alone are fewer than the rule's programs, K is split too; a gate needs both of
    its sums whole.
    """
    launch, (m, n), k = rule.launch, y.shape, weight.shape[-1]
    tiles = triton.cdiv(n, launch.block_n)
    most = min(_MOST_PARTS, k // launch.block_k)
    parts = 1 if activation else max(1, min(rule.programs // tiles, most))
    partial = counters = y
    if parts > 1:
        size = tiles * parts * launch.block_n * launch.block_m
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        own = joins is None or len(joins) < tiles
        counters = torch.zeros(tiles, dtype=torch.int32, device=x.device) if own else joins
    kernels.dense_skinny[(tiles, parts)](
        x, weight, y if bias is None else bias, y, partial, counters, m, n, k,
        x.stride(0), y.stride(0),
        BM=launch.block_m,
        BN=launch.block_n,
        BK=launch.block_k,
        PARTS=parts,
        EVEN=n % launch.block_n == 0 and k % launch.block_k == 0,
        BIAS=bias is not None,
        GATED=activation,
        PDL=launch.pdl,
        **launch.options,
    )  # fmt: skip
