"""Linear layers: picks a kernel by rows and format, and calls it."""

from __future__ import annotations

import attrs
import torch
import triton
from torch import Tensor

from halogen_triton import linear_kernels as kernels
from halogen_triton.dense import dense, dense_rule
from halogen_triton.int8 import Int8, RoundedRows, int8_linear, round_rows
from halogen_triton.interpreter import repair
from halogen_triton.launch import Launch, Rule, Tuning
from halogen_triton.plane_kernels import ZEROS
from halogen_triton.planes import GROUPED, Planes
from halogen_triton.tile_linear import tile_linear, tile_rows, tile_rule
from halogen_triton.tiles import ROWS, Tiles

repair()


Part = Tensor | Planes | Tiles | Int8


@attrs.frozen(eq=False)
class Stacked:
    """Parts of different formats whose outputs lie side by side (Q4_K files keep V in Q6_K)."""

    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        lead, (*_, k) = self.parts[0].shape[:-2], self.parts[0].shape
        return (*lead, sum(part.shape[-2] for part in self.parts), k)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Weight = Part | Stacked
"""Dense [N, K], planes, tiles, or several of them; with an expert axis in front where experts are
meant."""


@attrs.frozen(kw_only=True, eq=False)
class ExpertRows:
    """Which rows each tile of a grouped product takes (see `linear_kernels.expert_rows`)."""

    row_ids: Tensor
    """int32 [blocks * block_m]"""
    block_expert: Tensor
    """int32 [blocks], -1: unused."""
    block_m: int
    pairs: int
    """Rows of the result."""
    top_k: int
    """Pairs that share a row of x: 1 when x already has a row per pair."""


def linear(
    x: Tensor | RoundedRows,
    weight: Weight,
    tuning: Tuning,
    *,
    bias: Tensor | None = None,
    activation: int = 0,
    out_dtype: torch.dtype | None = None,
    joins: Tensor | None = None,
) -> Tensor:
    """X [T, K] times weight [N, K] transposed, plus bias: [T, N].

    With `activation` (see `pointwise_kernels.gated`; where `gates` allows it) the weight is gate
    over up and the result [T, N / 2]. `joins` are counters as `attention` takes them. Rounded rows
    go through W8A8 weights alone.
    """
    n, k = weight.shape[-2:]
    rows = x.shape[0]
    n = n // 2 if activation else n
    rule = dense_rule(weight, tuning, rows, n, pairs=int(activation > 0))
    if rule is not None:
        assert isinstance(weight, Tensor)
        return dense(
            x, weight, rule, bias=bias, activation=activation, out_dtype=out_dtype, joins=joins
        )
    x = _in_stored_order(x, weight)
    plain = rows > 1 and out_dtype in (None, x.dtype) and not isinstance(weight, Stacked | Int8)
    if plain and _gemm_rule(weight, tuning, rows, n, k).library:
        return _library(x, weight, bias)
    if rows > 1 and bias is None and _widens(x, weight, out_dtype):
        assert isinstance(weight, Tensor)
        if tuning.rule("dense_gemm", m=rows, n=n, k=k).library:
            return torch.mm(x, weight.T, out_dtype=torch.float32)
    y = torch.empty(rows, n, dtype=out_dtype or x.dtype, device=x.device)
    if rows:
        assert not activation or gates(rows, weight, tuning)
        _into(y, x, weight, tuning, bias, activation)
    return y


def _widens(x: Tensor, weight: Weight, out_dtype: torch.dtype | None) -> bool:
    """Whether the vendor's library multiplies these into float32 itself, as cuBLAS does halves."""
    halves = isinstance(weight, Tensor) and x.dtype == weight.dtype and x.element_size() == 2
    return halves and out_dtype is torch.float32 and x.is_cuda and torch.version.cuda is not None


def gates(rows: int, weight: Weight, tuning: Tuning) -> bool:
    """Whether `linear` can apply a gated activation itself."""
    if isinstance(weight, Tiles):
        n, k = weight.shape[0] // 2, weight.shape[1]
        own = rows == 1 or not tile_rule(tuning, weight, rows, n, k).library
        return own and n % ROWS == 0
    if rows == 1:
        return not isinstance(weight, Stacked | Int8)
    return dense_rule(weight, tuning, rows, weight.shape[-2] // 2, pairs=1) is not None


def _into(
    y: Tensor,
    x: Tensor | RoundedRows,
    weight: Weight,
    tuning: Tuning,
    bias: Tensor | None,
    activation: int,
) -> None:
    if isinstance(weight, Stacked):
        start = 0
        for part in weight.parts:
            end = start + part.shape[-2]
            own = None if bias is None else bias[start:end]
            _into(y[:, start:end], _in_stored_order(x, part), part, tuning, own, 0)
            start = end
        return
    rows, n = y.shape
    if isinstance(weight, Int8):
        rounded = x if isinstance(x, RoundedRows) else round_rows(x, pdl=tuning.pdl)
        int8_linear(y, rounded, weight, tuning, bias)
        return
    if isinstance(weight, Tiles) and not (rows > 1 and _rule(weight, tuning, y, x).library):
        tile_linear(y, x, weight, tuning, bias, activation)
        return
    if rows == 1 and isinstance(weight, Tensor):
        one = dense_rule(weight, tuning, rows, n)
        assert one is not None
        dense(x, weight, one, bias=bias, y=y)
        return
    if rows == 1:
        assert isinstance(weight, Planes)
        _gemv(x, weight, tuning, bias, activation, y)
        return
    rule = _rule(weight, tuning, y, x)
    # the library rounds to the type of x; where more is asked for, our kernel keeps float32
    if rule.library and y.dtype == x.dtype:
        y.copy_(_library(x, weight, bias))
        return
    assert not isinstance(weight, Tiles)
    launch = rule.launch
    grid = (triton.cdiv(n, launch.block_n), triton.cdiv(rows, launch.block_m))
    _gemm(x, weight, launch, bias, y, grid, None)


def _rule(weight: Tensor | Planes | Tiles, tuning: Tuning, y: Tensor, x: Tensor) -> Rule:
    """How more than one row is computed. Tiles know one launch for what the library rounds."""
    rule = _gemm_rule(weight, tuning, *y.shape, x.shape[1])
    wide = isinstance(weight, Tiles) and y.dtype != x.dtype
    return attrs.evolve(rule, library=False) if wide else rule


def _in_stored_order(x: Tensor, weight: Weight) -> Tensor:
    """Columns of x as a weight with an order of its own has them (GPTQ's act-order)."""
    perm = weight.perm if isinstance(weight, Planes | Tiles) else None
    return x if perm is None else x.index_select(1, perm)


def _gemm_rule(weight: Tensor | Planes | Tiles, tuning: Tuning, rows: int, n: int, k: int) -> Rule:
    if isinstance(weight, Tiles):
        return tile_rule(tuning, weight, rows, n, k)
    kind = "plane_gemm" if isinstance(weight, Planes) else "dense_gemm"
    return tuning.rule(kind, m=rows, n=n, k=k)


def _library(x: Tensor, weight: Tensor | Planes | Tiles, bias: Tensor | None) -> Tensor:
    """The vendor's product; planes are first dequantised to the type of x, for this call only."""
    if not isinstance(weight, Tensor):
        rows = torch.arange(weight.shape[0], dtype=torch.int32, device=x.device)
        weight = embedding_rows(rows, weight, x.dtype)
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def expert_linear(x: Tensor, weight: Weight, rows: ExpertRows, tuning: Tuning) -> Tensor:
    """A row per (token, choice) pair: x [T, K] through its expert of weight [E, N, K]: [pairs,
    N].
    """
    n, k = weight.shape[-2:]
    y = torch.empty(rows.pairs, n, dtype=x.dtype, device=x.device)
    start = 0
    for part in weight.parts if isinstance(weight, Stacked) else (weight,):
        n = part.shape[-2]
        rule = _gemm_rule(part, tuning, rows.block_m, n, k)
        launch = attrs.evolve(rule.launch, block_m=rows.block_m)
        grid = (triton.cdiv(n, launch.block_n), len(rows.block_expert))
        _gemm(x, part, launch, None, y[:, start : start + n], grid, rows)
        start += n
    return y


def embedding_rows(
    ids: Tensor, weight: Planes | Tiles, dtype: torch.dtype, *, scale: float = 1.0
) -> Tensor:
    """Rows `ids` [T] of a packed table [V, H], dequantised: [T, H]."""
    k = weight.shape[-1]
    y = torch.empty(ids.shape[0], k, dtype=dtype, device=ids.device)
    if isinstance(weight, Tiles):
        if ids.shape[0]:
            tile_rows(ids, weight, y, float(scale))
    elif ids.shape[0]:
        blocks = min(16, triton.next_power_of_2(k // 32))
        grid = (ids.shape[0], triton.cdiv(k // 32, blocks))
        kernels.plane_rows[grid](
            ids,
            *weight.tensors,
            y,
            k // 32,
            float(scale),
            NB=blocks,
            **_format(weight),
            num_warps=1,
        )
    return y


def _format(weight: Planes) -> dict[str, int]:
    """Constants of the kernels; see `plane_kernels`."""
    fmt = weight.format
    zeros = fmt.index == 6 and weight.supers is not weight.scales
    per = 4095 if weight.group == weight.shape[-1] else weight.group // 32
    grouped = per * 16 if fmt.name in GROUPED else 0
    return {
        "FORMAT": fmt.index + grouped + (ZEROS if zeros else 0),
        "HIGH": -1 if fmt.e2m1 else fmt.high_bits,
        "OFFSET": 0 if zeros else fmt.offset,
    }


def _gemv(
    x: Tensor,
    weight: Planes,
    tuning: Tuning,
    bias: Tensor | None,
    activation: int,
    y: Tensor,
) -> None:
    n, k = y.shape[1], weight.shape[-1]
    launch = tuning.launch("plane_gemv", n=n, k=k)
    blocks = min(launch.block_k // 32, triton.next_power_of_2(k // 32))
    kernels.plane_gemv[(triton.cdiv(n, launch.block_n),)](
        x, *weight.tensors, y if bias is None else bias, y, n, k // 32,
        BN=launch.block_n, NB=blocks, BIAS=bias is not None, GATED=activation, PDL=tuning.pdl,
        **_format(weight), **launch.options,
    )  # fmt: skip


def _gemm(
    x: Tensor,
    weight: Tensor | Planes,
    launch: Launch,
    bias: Tensor | None,
    y: Tensor,
    grid: tuple[int, int],
    rows: ExpertRows | None,
) -> None:
    m, n = y.shape
    k = weight.shape[-1]
    lists = (y, y) if rows is None else (rows.row_ids, rows.block_expert)
    inner = k // 32 if isinstance(weight, Planes) else k
    tail = (*lists, m, n, inner, x.stride(0), y.stride(0), 1 if rows is None else rows.top_k)
    extra = y if bias is None else bias
    flags = {
        "BM": launch.block_m,
        "BN": launch.block_n,
        "BIAS": bias is not None,
        "EXPERTS": rows is not None,
        "PDL": launch.pdl,
    }
    if isinstance(weight, Planes):
        kernels.plane_gemm[grid](
            x, *weight.tensors, extra, y, *tail,
            NB=launch.block_k // 32, **flags, **_format(weight), **launch.options,
        )  # fmt: skip
    else:
        kernels.dense_gemm[grid](
            x, weight, extra, y, *tail, BK=launch.block_k, **flags, **launch.options
        )
