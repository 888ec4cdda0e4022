"""Dense linear layers of a decode step: which launch, and how their edges are fused."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import triton
from torch import Tensor

from halogen_triton import dense_kernels as kernels
from halogen_triton.attention import HeadShape, LayerKV
from halogen_triton.interpreter import repair
from halogen_triton.launch import Rule, Tuning
from halogen_triton.pointwise import Rotation, rms_norm

repair()

_MOST_PARTS = 16


@attrs.frozen(kw_only=True, eq=False)
class Normed:
    """RMSNorm of a residual stream whose division the next product makes."""

    stream: Tensor
    """[M, H]"""
    weighted: Tensor
    """[M, H]: the stream times `weight`."""
    squares: Tensor
    """float32 [tiles, M]: sums over parts of a row."""
    weight: Tensor
    """[H]"""
    eps: float

    @property
    def shape(self) -> torch.Size:
        return self.stream.shape

    def settled(self, *, pdl: bool = False) -> Tensor:
        """The norm itself."""
        return rms_norm(self.stream, self.weight, self.eps, pdl=pdl)[0]


@attrs.frozen(eq=False)
class Product:
    """x W^T + bias that is not computed yet: what follows may be part of it."""

    x: Tensor | Normed
    weight: Tensor
    bias: Tensor | None
    rule: Rule
    """Of a plain result."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.x.shape[0], self.weight.shape[0]))


def dense_rule(weight: object, tuning: Tuning, rows: int, n: int, *, pairs: int = 0) -> Rule | None:
    """How `rows` of a dense weight are multiplied, n results each; None: by another kernel.

    `pairs`: 1 where a result needs two rows of the weight for a gate, 2 where for a rotation.
    """
    if not isinstance(weight, Tensor) or weight.ndim != 2 or rows < 1:
        return None
    shape = {"n": n, "k": weight.shape[1], "pairs": pairs}
    if rows == 1:
        return tuning.rule("dense_gemv", **shape)
    if "dense_skinny" not in tuning.rules:
        return None
    rule = tuning.rule("dense_skinny", m=rows, bytes=weight.element_size(), **shape)
    return None if rule.library or rows > rule.launch.block_m else rule


def dense(
    x: Tensor | Normed,
    weight: Tensor,
    rule: Rule,
    *,
    bias: Tensor | None = None,
    activation: int = 0,
    out_dtype: torch.dtype | None = None,
    y: Tensor | None = None,
    joins: Tensor | None = None,
) -> Tensor:
    """X [M, K] through weight [N, K] by a rule of `dense_rule`: [M, N], in y where it is given.

    With `activation` (see `pointwise_kernels.gated`) the weight is gate over up and the result
    [M, N / 2]. `joins` are counters as `attention` takes them.
    """
    n = weight.shape[0] // 2 if activation else weight.shape[0]
    grid = _Grid.of(rule, x, weight, n, joins, pair=bool(activation))
    rows = grid.rows
    if y is None:
        y = torch.empty(rows.shape[0], n, dtype=out_dtype or rows.dtype, device=rows.device)
    kernels.dense[grid.programs](
        rows, weight, y if bias is None else bias, y, *_squares(x, y), *grid.join,
        y.shape[0], y.shape[1], weight.shape[1], rows.stride(0), y.stride(0),
        **grid.constants,
        NORMED=isinstance(x, Normed),
        BIAS=bias is not None,
        GATED=activation,
        **rule.launch.options,
    )  # fmt: skip
    return y


def to_stream(
    product: Product, residual: Tensor, norm: Tensor, eps: float, joins: Tensor | None
) -> Normed:
    """The residual stream plus a product, and its norm; `norm` is the norm's weight [N]."""
    rule, weight, bias = product.rule, product.weight, product.bias
    m, n = product.shape
    grid = _Grid.of(rule, product.x, weight, n, joins)
    stream, weighted = torch.empty_like(residual), torch.empty_like(residual)
    squares = torch.empty(grid.programs[0], m, dtype=torch.float32, device=residual.device)
    assert isinstance(product.x, Tensor)
    kernels.dense_stream[grid.programs](
        product.x, weight, residual if bias is None else bias, residual, norm, stream, weighted,
        squares, *grid.join, m, n, weight.shape[1], product.x.stride(0),
        **grid.constants,
        BIAS=bias is not None,
        WARM=rule.launch.warm,
        **rule.launch.options,
    )  # fmt: skip
    return Normed(stream=stream, weighted=weighted, squares=squares, weight=norm, eps=eps)


def to_heads(
    product: Product,
    rule: Rule,
    kv: LayerKV,
    positions: Tensor,
    slots: Tensor,
    shape: HeadShape,
    rope: Rotation,
    joins: Tensor | None,
) -> Tensor:
    """Q [M, Hq D] rotated, K and V in their slots: `qkv_rope_store` of a product."""
    x, weight, bias, d = product.x, product.weight, product.bias, shape.head_dim
    half = d // 2
    grid = _Grid.of(rule, x, weight, weight.shape[0] // 2, joins, pair=True, most=half)
    rows = grid.rows
    q = torch.empty(rows.shape[0], shape.num_heads * d, dtype=rows.dtype, device=rows.device)
    kernels.dense_heads[grid.programs](
        rows, weight, q if bias is None else bias, q, kv.data, positions, slots, rope.turns,
        float(rope.factor), *_squares(x, q), *grid.join,
        rows.shape[0], weight.shape[1], rows.stride(0),
        HQ=shape.num_heads,
        HKV=shape.num_kv_heads,
        D=d,
        PAGE=kv.block_size,
        NEOX=rope.neox,
        **grid.constants,
        NORMED=isinstance(x, Normed),
        BIAS=bias is not None,
        **rule.launch.options,
    )  # fmt: skip
    return q


@attrs.frozen(eq=False)
class _Grid:
    """What launches of one product share."""

    rows: Tensor
    programs: tuple[int, int]
    join: tuple[Tensor, Tensor]
    constants: dict[str, Any]

    @classmethod
    def of(
        cls,
        rule: Rule,
        x: Tensor | Normed,
        weight: Tensor,
        n: int,
        joins: Tensor | None,
        *,
        pair: bool = False,
        most: int = 1 << 30,
    ) -> _Grid:
        """For n results (or pairs of them) a row; a tile has at most `most`.

        Where tiles of N alone are fewer than the rule's programs, K is split too.
        """
        rows = x.weighted if isinstance(x, Normed) else x
        launch, k, device = rule.launch, weight.shape[1], weight.device
        bm, bn, bk = max(1, launch.block_m), min(launch.block_n, most), launch.block_k
        tiles, chunks = triton.cdiv(n, bn), triton.cdiv(k, bk)
        parts = max(1, min(rule.programs // tiles, _MOST_PARTS, chunks))
        # none of them empty
        parts = triton.cdiv(chunks, triton.cdiv(chunks, parts))
        join = (rows, rows)
        if parts > 1:
            size = tiles * parts * bn * bm * (2 if pair else 1)
            partial = torch.empty(size, dtype=torch.float32, device=device)
            if joins is None or len(joins) < tiles:
                joins = torch.zeros(tiles, dtype=torch.int32, device=device)
            join = (partial, joins)
        constants = {
            "BM": bm,
            "BN": bn,
            "BK": bk,
            "PARTS": parts,
            "EVEN": n % bn == 0 and k % bk == 0,
            "PDL": launch.pdl,
        }
        return cls(rows, (tiles, parts), join, constants)


def _squares(x: Tensor | Normed, other: Tensor) -> tuple[Tensor, int, float]:
    """Arguments of a product over a norm; `other` where there is none."""
    if isinstance(x, Normed):
        return x.squares, x.squares.shape[0], x.eps
    return other, 0, 0.0
