"""Weights: views of the model file as ggml reads them, and values back out of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.spi import FORMATS, ConfigError, QuantTensor, WeightRole
from halogen_cpu_ggml.reblock import FOREIGN, reblocked

VECTOR_ROLES = (WeightRole.NORM, WeightRole.BIAS, WeightRole.SINKS)


@attrs.define(eq=False)
class Part:
    """One tensor of a weight: `data` is its raw bytes, often a view of the file."""

    format: str
    ggml_type: int
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    tiles: Any = None
    """The same values in the order that the kernels read (`tiles.Tiles`)."""
    source: str = ""
    """The checkpoint's format, if another: `data` is then this part's own, not the file's."""
    error: float = 0.0
    """Largest relative difference of a value from the checkpoint's."""
    perm: NDArray[np.int32] | None = None
    """Column j multiplies input perm[j]."""

    @property
    def outputs(self) -> int:
        return self.shape[-2]

    @property
    def inputs(self) -> int:
        return self.shape[-1]


@attrs.define(eq=False)
class Weight:
    """Payload of a packed weight: parts stacked along the output axis, or a float32 vector."""

    parts: tuple[Part, ...] = ()
    vector: NDArray[np.float32] | None = None


def part(tensor: QuantTensor) -> Part:
    """Check a tensor against its format and wrap it, without a copy if ggml knows the format.

    Raises ConfigError (HRT-3610) for an unknown format or bytes that do not fit the shape.
    """
    if tensor.format in FOREIGN:
        made = reblocked(tensor)
        out = part(made.tensor)
        out.source, out.error, out.perm = tensor.format, made.error, made.perm
        return out
    known = FORMATS.get(tensor.format)
    if known is None or known.ggml_type is None:
        own = (n for n, f in FORMATS.items() if f.ggml_type is not None)
        allowed = ", ".join(sorted((*own, *FOREIGN)))
        raise ConfigError(
            f"weight `{tensor.name}` has format `{tensor.format}`; cpu_ggml takes {allowed}",
            code="HRT-3610",
            fix="convert the checkpoint or use cpu_reference",
        )
    elements = math.prod(tensor.shape)
    if tensor.shape[-1] % known.block or tensor.data.nbytes != known.nbytes(elements):
        raise ConfigError(
            f"weight `{tensor.name}` {tensor.shape} in {tensor.format} needs "
            f"{known.nbytes(elements)} bytes in rows of whole blocks of {known.block}; "
            f"it has {tensor.data.nbytes}",
            code="HRT-3610",
        )
    data = np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)
    return Part(tensor.format, known.ggml_type, tuple(tensor.shape), data)


def stacked(tensors: Sequence[QuantTensor], role: WeightRole) -> tuple[Part, ...]:
    """Parts of one weight; they must agree on everything but the output axis."""
    parts = tuple(part(t) for t in tensors)
    kinds = {(*p.shape[:-2], p.inputs) for p in parts}
    if len(kinds) != 1:
        shapes = [t.shape for t in tensors]
        raise ConfigError(f"cannot stack weights of shapes {shapes}", code="HRT-3610")
    ordered = [p for p in parts if p.perm is not None]
    if ordered and (len(parts[0].shape) > 2 or role is WeightRole.EMBEDDING):
        raise ConfigError(
            f"weight `{tensors[0].name}` has an order of columns of its own; "
            "cpu_ggml takes that of plain matrices only",
            code="HRT-3610",
            fix="take a checkpoint quantised without act-order",
        )
    return parts


def matrices(part: Part) -> list[Part]:
    """A part that has only tiles as one [N, K] part per expert."""
    each = np.split(part.tiles.data, math.prod(part.shape[:-2]))
    tiles = [attrs.evolve(part.tiles, data=data) for data in each]
    return [attrs.evolve(part, shape=part.shape[-2:], tiles=one) for one in tiles]


def vector(tensors: Sequence[QuantTensor]) -> NDArray[np.float32]:
    """Float32 values of a norm, bias or sinks vector."""
    pieces = []
    for t in tensors:
        raw = np.ascontiguousarray(t.data).reshape(-1).view(np.uint8)
        if t.format == "F32":
            values = raw.view(np.float32)
        elif t.format == "F16":
            values = raw.view(np.float16).astype(np.float32)
        elif t.format == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            raise ConfigError(
                f"vector `{t.name}` has format `{t.format}`; F32, F16 and BF16 are possible",
                code="HRT-3610",
            )
        pieces.append(values)
    joined = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    # a copy: read in the file, each vector would keep 64 KiB of pages around it resident
    return np.array(joined, np.float32)
