"""Dense linear layers of a decode step: which launch, and how their edges are fused.

Of one row by `dense_kernels`; on Hopper of up to 64 by `dense_hopper`, where nothing is fused: the
small kernels between products hide behind the weights that are under way (docs/adr/0085).
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import triton
from torch import Tensor

from halogen_triton import dense_kernels as kernels
from halogen_triton.attention import HeadShape, LayerKV
from halogen_triton.interpreter import active, repair
from halogen_triton.launch import Launch, Rule, Tuning
from halogen_triton.pointwise import Rotation, rms_norm

repair()

_MOST_PARTS = 16


@attrs.frozen(kw_only=True, eq=False)
class Normed:
    """RMSNorm of one row of a residual stream whose division the next product makes."""

    stream: Tensor
    """[1, H]"""
    weighted: Tensor
    """[1, H]: the stream times `weight`."""
    squares: Tensor
    """float32 [tiles]: sums over parts of the row."""
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
    """x W^T + bias of one row that is not computed yet: what follows may be part of it."""

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
    if "dense_ring" in tuning.rules and pairs < 2 and _streams(weight) and not active():
        rule = tuning.rule("dense_ring", m=rows, **shape)
        if rows <= rule.launch.block_m:
            return rule
    return tuning.rule("dense_gemv", **shape) if rows == 1 else None


def _streams(matrix: Tensor) -> bool:
    """Whether Hopper's copy engine can read it: 16-bit elements, rows and base at 16 bytes."""
    halves = matrix.dtype in (torch.bfloat16, torch.float16)
    lines = matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0
    return halves and lines and matrix.data_ptr() % 16 == 0


def _readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """X where the copy engine can read it as `dtype`, else a copy."""
    if x.dtype == dtype and _streams(x):
        return x
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


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
    rows = x.weighted if isinstance(x, Normed) else x
    if y is None:
        y = torch.empty(rows.shape[0], n, dtype=out_dtype or rows.dtype, device=rows.device)
    if rule.ring:
        _through_ring(rows, weight, bias, y, rule, activation, joins)
        return y
    launch = rule.launch
    kernels.dense[(triton.cdiv(n, launch.block_n),)](
        rows, weight, y if bias is None else bias, y, *_squares(x, y), n, weight.shape[1],
        **_tile(launch, weight, n),
        NORMED=isinstance(x, Normed),
        BIAS=bias is not None,
        GATED=activation,
        **launch.options,
    )  # fmt: skip
    return y


def _through_ring(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    rule: Rule,
    activation: int,
    joins: Tensor | None,
) -> None:
    """`dense` on Hopper.

    As many programs as the device holds at once (`rule.programs`) take a tile each, again and
    again; tiles that would be left for few of them are cut into parts of K: all end at once.
    """
    # Gluon is loaded where its kernels run
    from halogen_triton import dense_hopper

    x = _readable(x, weight.dtype)
    launch, (m, n), k = rule.launch, y.shape, x.shape[1]
    bm, bn, bk = launch.block_m, launch.block_n, launch.block_k
    tiles, chunks = triton.cdiv(n, bn), triton.cdiv(k, bk)
    rest = tiles % rule.programs
    parts = min(rule.programs // max(1, rest), _MOST_PARTS, chunks)
    # none of them empty
    parts = triton.cdiv(chunks, triton.cdiv(chunks, parts))
    partial = counters = x
    if rest and parts > 1:
        size = rest * parts * bn * bm * (2 if activation else 1)
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counters = joins
        if joins is None or len(joins) < tiles:
            counters = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    dense_hopper.few_rows[(tiles - rest + rest * parts,)](
        dense_hopper.boxes(weight, bn, bk), dense_hopper.boxes(x, bm, bk),
        y if bias is None else bias, y, partial, counters,
        m, n, k, y.stride(0), tiles - rest, parts,
        STAGES=launch.stages, SPLIT=partial is not x, BIAS=bias is not None, GATED=activation,
        PDL=launch.pdl, **launch.options,
    )  # fmt: skip


def to_stream(product: Product, residual: Tensor, norm: Tensor, eps: float) -> Normed:
    """The residual stream plus a product, and its norm; `norm` is the norm's weight [N]."""
    launch, weight, bias = product.rule.launch, product.weight, product.bias
    n, k = weight.shape
    tiles = triton.cdiv(n, launch.block_n)
    stream, weighted = torch.empty_like(residual), torch.empty_like(residual)
    squares = torch.empty(tiles, dtype=torch.float32, device=residual.device)
    assert isinstance(product.x, Tensor)
    kernels.dense_stream[(tiles,)](
        product.x, weight, residual if bias is None else bias, residual, norm, stream, weighted,
        squares, n, k,
        **_tile(launch, weight, n),
        BIAS=bias is not None,
        **launch.options,
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
) -> Tensor:
    """Q [1, Hq D] rotated, K and V in their slots: `qkv_rope_store` of a product."""
    x, weight, bias, d = product.x, product.weight, product.bias, shape.head_dim
    # a tile lies within a head
    launch = attrs.evolve(rule.launch, block_n=min(rule.launch.block_n, d // 2))
    pairs = weight.shape[0] // 2
    rows = x.weighted if isinstance(x, Normed) else x
    q = torch.empty(1, shape.num_heads * d, dtype=rows.dtype, device=rows.device)
    kernels.dense_heads[(triton.cdiv(pairs, launch.block_n),)](
        rows, weight, q if bias is None else bias, q, kv.data, positions, slots, rope.turns,
        float(rope.factor), *_squares(x, q), weight.shape[1],
        HQ=shape.num_heads,
        HKV=shape.num_kv_heads,
        D=d,
        PAGE=kv.block_size,
        NEOX=rope.neox,
        **_tile(launch, weight, pairs),
        NORMED=isinstance(x, Normed),
        BIAS=bias is not None,
        **launch.options,
    )  # fmt: skip
    return q


def _tile(launch: Launch, weight: Tensor, n: int) -> dict[str, Any]:
    """Constants of a product of one row with n results (or pairs of them)."""
    bn, bk = launch.block_n, launch.block_k
    return {
        "BN": bn,
        "BK": bk,
        "EVEN": n % bn == 0 and weight.shape[1] % bk == 0,
        "PDL": launch.pdl,
    }


def _squares(x: Tensor | Normed, other: Tensor) -> tuple[Tensor, int, float]:
    """Arguments of a product over a norm; `other` where there is none."""
    if isinstance(x, Normed):
        return x.squares, x.squares.shape[0], x.eps
    return other, 0, 0.0
