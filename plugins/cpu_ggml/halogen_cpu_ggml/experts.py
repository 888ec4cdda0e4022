"""Mixture of experts by our kernels: the rows of one expert side by side, products per group."""

from __future__ import annotations

import ctypes as C
from typing import TYPE_CHECKING

import attrs

from halogen_core.spi import MoESpec
from halogen_cpu_ggml import native
from halogen_cpu_ggml.native import FLOAT_FORMATS, activation_bytes
from halogen_cpu_ggml.recorder import rows_address
from halogen_cpu_ggml.tape import Node, Tape
from halogen_cpu_ggml.weights import Part

if TYPE_CHECKING:
    from halogen_cpu_ggml.kernel_ops import KernelOps


@attrs.frozen
class Groups:
    """Which rows go to which expert; arrays that the kernels write at run time."""

    count: int
    """Rows at capacity: tokens times experts per token."""
    start: Node
    order: Node
    place: Node
    total: Node
    share: Node


def mixture(
    ops: KernelOps,
    tape: Tape,
    x: Node,
    logits: Node,
    gate_up: tuple[Part, ...],
    down: tuple[Part, ...],
    spec: MoESpec,
) -> Node:
    """X [T, H] through the experts that router `logits` [T, E] choose, weighted: [T, H]."""
    groups = _group(ops, tape, logits, spec)
    both = _product(ops, tape, x, gate_up, groups, spec, first=True)
    width = both.shape[1] // 2
    gate = native.Gate(width=width, kind=native.ACTIVATIONS[spec.activation.value])
    tape.point(gate, "rows", groups.total)
    shape = (groups.count, width)
    inner = tape.custom(ops.kernels.table.gate, gate, shape=shape, reads={"gate_up": both})
    out = _product(ops, tape, inner, down, groups, spec, first=False)
    params = native.Combine(rows=rows_address(tape, x), top=spec.top_k, width=out.shape[1])
    reads = {"place": groups.place, "share": groups.share, "x": out}
    total = tape.custom(ops.kernels.table.combine, params, shape=x.shape, reads=reads)
    total.rows = x.rows
    return total


def _group(ops: KernelOps, tape: Tape, logits: Node, spec: MoESpec) -> Groups:
    tokens, count = logits.shape[0], logits.shape[0] * spec.top_k
    rows = rows_address(tape, logits)
    chosen = tape.scratch(count * 4)
    choose = native.Choose(
        rows=rows,
        experts=spec.num_experts,
        top=spec.top_k,
        sigmoid=spec.gating == "sigmoid",
        normalise=spec.normalize_top_k,
        scale=spec.weight_scale,
    )
    share = tape.custom(
        ops.kernels.table.choose, choose, shape=(tokens, spec.top_k), out="share",
        reads={"logits": logits}, writes={"chosen": chosen},
    )  # fmt: skip
    start, total = tape.scratch((spec.num_experts + 1) * 8), tape.scratch(8)
    order, place = tape.scratch(count * 4), tape.scratch(count * 4)
    group = native.Group(rows=rows, experts=spec.num_experts, top=spec.top_k)
    tape.custom(
        ops.kernels.table.group, group, shape=(1,), out="unused", reads={"chosen": chosen},
        writes={"start": start, "total": total, "order": order, "place": place},
    )  # fmt: skip
    return Groups(count=count, start=start, order=order, place=place, total=total, share=share)


def _product(
    ops: KernelOps,
    tape: Tape,
    x: Node,
    parts: tuple[Part, ...],
    groups: Groups,
    spec: MoESpec,
    *,
    first: bool,
) -> Node:
    """Each group's rows times its expert: [T k, sum of N]; `first`: x is in the tokens' order."""
    array, column = (native.PartTiles * len(parts))(), 0
    packed: dict[bool, Node] = {}
    for slot, part in zip(array, parts, strict=True):
        tiles, floats = ops.tiles(part), part.format in FLOAT_FORMATS
        tape.keep.append(tiles)
        slot.tiles, slot.format = tiles.address, native.FORMATS[part.format]
        slot.n, slot.column = part.outputs, column
        column += part.outputs
        if floats not in packed:
            packed[floats] = _regrouped(ops, tape, x, groups, spec, floats=floats, first=first)
    params = native.Experts(
        experts=spec.num_experts, k=x.shape[1], stride=column,
        nparts=len(parts), parts=C.addressof(array),
    )  # fmt: skip
    shape = (groups.count, column)
    out = tape.custom(ops.kernels.table.experts, params, shape=shape, reads={"start": groups.start})
    for slot, part in zip(array, parts, strict=True):
        tape.point(slot, "x", packed[part.format in FLOAT_FORMATS])
    tape.keep.append(array)
    return out


def _regrouped(
    ops: KernelOps,
    tape: Tape,
    x: Node,
    groups: Groups,
    spec: MoESpec,
    *,
    floats: bool,
    first: bool,
) -> Node:
    """The rows of x group by group, in panels of floats or of 8-bit blocks."""
    k = x.shape[1]
    row = k * 4 if floats else activation_bytes(k)
    out = tape.scratch(groups.count * row)
    params = native.Regroup(experts=spec.num_experts, top=spec.top_k, k=k, floats=floats)
    reads = {"start": groups.start, "x": x} | ({"order": groups.order} if first else {})
    tape.custom(
        ops.kernels.table.regroup, params, shape=(1,), out="unused", reads=reads,
        writes={"out": out},
    )  # fmt: skip
    return out
