"""Safetensors with weights of 8-bit floats: compressed-tensors, transformers, DeepSeek and Qwen.

A matrix is `….weight` of type F8_E4M3 or F8_E5M2, its scales lie beside it: one (per tensor), one
for each output (per channel), or one for each block of `weight_block_size` or `block_structure`.
`weight_scale_inv` is, by its makers' custom, a factor like `weight_scale`. All become `F8_E4M3` or
`F8_E5M2` as `halogen_core.spi.float8` defines them.

Activations are not rounded to fp8, whatever the file says: dynamic scales need no storage, static
ones (`input_scale`, `activation_scale`) are left unread. That is more exact than asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from halogen_core.loader import unpacking as un
from halogen_core.loader.packed_matrix import PackedMatrix, Scheme
from halogen_core.spi.float8 import FLOAT8
from halogen_core.spi.operations import QuantTensor

_SUFFIXES = re.compile(
    r"\.(weight|weight_scale_inv|weight_scale|weight_zero_point"
    r"|input_scale|input_zero_point|input_scale_ub|activation_scale)$"
)
_SCALES = ("weight_scale_inv", "weight_scale")
_STRATEGIES = ("tensor", "channel", "block")


def finegrained(config: Mapping[str, Any]) -> Scheme:
    """Of `quant_method: fp8`, and of `fbgemm_fp8`, which has a scale per output."""
    block = config.get("weight_block_size")
    if config.get("fmt", "e4m3") not in ("e4m3", "e5m2"):
        raise un.Unfit(f"fp8 of the form `{config['fmt']}`")
    if config.get("expert_dtype", "fp8") != "fp8":
        raise un.Unfit(f"experts of type `{config['expert_dtype']}`")
    how = config.get("activation_scheme", "dynamic")
    if how not in ("dynamic", "static"):
        raise un.Unfit(f"activations are scaled in the way `{how}`")
    return _scheme(block, how)


def compressed(groups: list[Mapping[str, Any]]) -> Scheme:
    """Of compressed-tensors' `float-quantized`, by its `config_groups`."""
    if not groups:
        raise un.Unfit("float-quantized without groups")
    blocks = set()
    for group in groups:
        weights = group["weights"]
        if weights["num_bits"] != 8 or weights.get("type") != "float":
            raise un.Unfit(f"float-quantized weights of {weights['num_bits']} bits")
        if weights.get("strategy") not in _STRATEGIES or not weights.get("symmetric", True):
            raise un.Unfit(f"fp8 weights of the strategy `{weights.get('strategy')}`")
        blocks.add(tuple(weights.get("block_structure") or ()))
    if len(blocks - {()}) > 1:
        raise un.Unfit(f"fp8 weights in blocks of several sizes, {sorted(blocks - {()})}")
    inputs = [i for group in groups if (i := group.get("input_activations"))]
    how = "static" if any(not i.get("dynamic") for i in inputs) else "dynamic" if inputs else None
    return _scheme(next(iter(blocks - {()}), None), how)


def _scheme(block: Any, activations: str | None) -> Scheme:
    if block is not None and not (
        isinstance(block, (list, tuple))
        and len(block) == 2
        and all(type(size) is int and 1 <= size < 1 << 31 for size in block)
    ):
        raise un.Unfit(f"fp8 weights in blocks of {block!r}")
    note = ""
    if activations is not None:
        note = f"activations are meant to be rounded to fp8 ({activations} scales); they stay exact"
    return Scheme(
        _SUFFIXES,
        _SCALES,
        _read,
        _shape,
        block=tuple(block) if block else None,
        marks=FLOAT8,
        note=note,
    )


def _shape(matrix: PackedMatrix) -> tuple[int, ...]:
    return matrix.stored_shape("weight")


def _read(matrix: PackedMatrix) -> QuantTensor:
    kind, shape = matrix.stored_dtype("weight"), matrix.stored_shape("weight")
    given = [name for name in _SCALES if name in matrix.tensors]
    if kind not in FLOAT8 or len(shape) != 2:
        raise un.Unfit(f"it has scales of fp8, its values are {kind} {list(shape)}")
    if len(given) != 1:
        raise un.Unfit(f"it needs one of {' and '.join(_SCALES)}, it has {len(given)}")
    if "weight_zero_point" in matrix.tensors and (matrix.array("weight_zero_point") & 127).any():
        raise un.Unfit("its fp8 values have zero points")
    scale = _factors(matrix, given[0])
    block = _block(matrix, shape, scale)
    grid = tuple(-(-size // part) for size, part in zip(shape, block, strict=True))
    return QuantTensor(
        format=kind,
        shape=shape,
        data=matrix.array("weight").reshape(-1),
        name=matrix.name,
        aux={"scale": scale.reshape(grid), "block": np.array(block, np.int32)},
    )


def _factors(matrix: PackedMatrix, name: str) -> un.Array:
    """Scales as float32; UE8M0 ones are powers of two."""
    stored = matrix.array(name)
    if matrix.stored_dtype(name) == "F8_E8M0":
        powers = np.ldexp(1.0, stored.astype(np.int32) - 127)
        stored = np.where(stored < 255, powers, np.nan).astype(np.float32)
    return un.floats(stored).astype(np.float32)


def _block(matrix: PackedMatrix, shape: tuple[int, ...], scale: un.Array) -> tuple[int, int]:
    """Rows and columns under one scale, told by how many scales there are."""
    n, k = shape
    if scale.size == 1:
        return max(n, 1), max(k, 1)
    if scale.shape in ((n,), (n, 1)):
        return 1, max(k, 1)
    block = matrix.scheme.block
    if block is None or scale.shape != (-(-n // block[0]), -(-k // block[1])):
        size = "" if block is None else f" or for blocks of {list(block)}"
        raise un.Unfit(
            f"values are {list(shape)}, scales {list(scale.shape)}; wanted is one for all, for "
            f"each row{size}"
        )
    return block
