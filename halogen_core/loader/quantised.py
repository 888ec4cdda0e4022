"""Quantised matrices in Hugging Face directories: AWQ, GPTQ, compressed-tensors, MXFP4, fp8.

Each vendor packs otherwise; here all become one of few formats of `QuantTensor`:

- `INT4`: `data` holds codes 0 … 15 along K, element 2 j in the low nibble of byte j of a row.
  `aux`: `scale` float16 or float32 [N, G] with G groups of K / G neighbours, `zero` uint8 [N, G]
  (absent: 8 everywhere), `perm` int32 [K] (absent: identity). Value = scale * (code - zero); stored
  column j multiplies input `perm[j]` (GPTQ's act-order, sorted so that groups are neighbours).
- `W8A8`, `W8A16`: int8 `data`, `aux["scale"]` float32 [N]; the first also wants activations rounded
  to int8, dynamically, a scale per token.
- `MXFP4`: the blocks of GGUF (OCP Microscaling Formats, 2023).
- `F8_E4M3`, `F8_E5M2`: codes as stored, a scale per block (`halogen_core.loader.fp8`).

What does not fit is refused by name (HRT-2011).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from halogen_core.loader import fp8
from halogen_core.loader import unpacking as un
from halogen_core.loader.packed_matrix import PackedMatrix, Scheme, refused
from halogen_core.spi.operations import QuantTensor

_READ = "awq (4 bits, gemm), gptq (4 bits), compressed-tensors (int4, int8, fp8, mxfp4), fp8, mxfp4"


def read_scheme(path: Path, config: Mapping[str, Any]) -> Scheme | None:
    """What config.json says of quantisation, None where nothing; raises `ModelError` (HRT-2011)."""
    given = config.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    reader = _SCHEMES.get(str(method))
    try:
        if reader is None:
            raise un.Unfit(f"it is quantised with `{method}`")
        return reader(given)
    except (un.Unfit, KeyError, TypeError, AttributeError) as exc:
        raise refused(path, f"`{path}` cannot be read: {exc}; read are {_READ}") from exc


# ---------------------------------------------------------------- AWQ and GPTQ


def _awq(config: Mapping[str, Any]) -> Scheme:
    version = str(config.get("version", "gemm")).lower()
    bits = config.get("bits", config.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise un.Unfit(f"AWQ of version `{version}` with {bits} bits")
    size = config.get("group_size", config.get("q_group_size", 128))
    return Scheme(
        re.compile(r"\.(qweight|qzeros|scales)$"),
        ("qweight",),
        _read_awq,
        _awq_shape,
        _group_size(size),
    )


def _gptq(config: Mapping[str, Any]) -> Scheme:
    if config.get("bits") != 4:
        raise un.Unfit(f"GPTQ with {config.get('bits')} bits")
    form = config.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise un.Unfit(f"GPTQ of the form `{form}`")
    return Scheme(
        re.compile(r"\.(qweight|qzeros|scales|g_idx)$"),
        ("qweight",),
        _read_gptq,
        lambda m: (m.stored_shape("qweight")[1], 8 * m.stored_shape("qweight")[0]),
        _group_size(config.get("group_size", 128)),
        zeros_less_one=form == "gptq",
    )


def _group_size(value: Any) -> int:
    if type(value) is not int or not (value == -1 or value > 0):
        raise un.Unfit(f"groups of {value!r}")
    return value


def _awq_shape(matrix: PackedMatrix) -> tuple[int, ...]:
    k, words = matrix.stored_shape("qweight")
    return 8 * words, k


def _read_awq(matrix: PackedMatrix) -> QuantTensor:
    codes = un.awq_columns(matrix.array("qweight")).T
    zero = un.awq_columns(matrix.array("qzeros")).T
    return _int4(matrix, codes, matrix.array("scales").T, zero, None)


def _read_gptq(matrix: PackedMatrix) -> QuantTensor:
    codes = un.nibbles(matrix.array("qweight").T)
    zero = un.nibbles(matrix.array("qzeros")).T
    if matrix.scheme.zeros_less_one:
        zero = (zero + 1) & 15
    order = matrix.array("g_idx") if "g_idx" in matrix.tensors else None
    return _int4(matrix, codes, matrix.array("scales").T, zero, order)


def _int4(
    matrix: PackedMatrix,
    codes: un.Array,
    scale: un.Array,
    zero: un.Array | None,
    order: un.Array | None,
) -> QuantTensor:
    """Canonical form of codes [N, K], scale and zero [N, G], group of each column [K]."""
    rows, k = codes.shape
    size = matrix.scheme.group_size
    groups = scale.shape[-1] if size == 0 else 1 if size == -1 else -(-k // size)
    if k % (2 * groups) or scale.shape != (rows, groups):
        raise un.Unfit(f"codes are {codes.shape}, scales {scale.shape}, groups of {size}")
    aux = {"scale": un.floats(scale)}
    if zero is not None and (zero != 8).any():
        if zero.shape != scale.shape:
            raise un.Unfit(f"zeros are {zero.shape}, scales {scale.shape}")
        aux["zero"] = un.contiguous(zero)
    perm = un.act_order(order, k, groups)
    if perm is not None:
        codes, aux["perm"] = codes[:, perm], perm
    data = un.pairs(codes)
    return QuantTensor(format="INT4", shape=(rows, k), data=data, name=matrix.name, aux=aux)


# ---------------------------------------------------------------- compressed-tensors, MXFP4


def _compressed(config: Mapping[str, Any]) -> Scheme:
    form = config.get("format")
    groups = list(config["config_groups"].values())
    inputs = [group.get("input_activations") for group in groups]
    dynamic = [i for i in inputs if i]
    if form == "int-quantized":
        if any(not i.get("dynamic") or i.get("num_bits") != 8 for i in dynamic) or (
            len(dynamic) not in (0, len(inputs))
        ):
            raise un.Unfit("its activations are rounded with stored scales or to other than 8 bits")
        suffixes = re.compile(r"\.(weight|weight_scale|weight_zero_point)$")
        needed = ("weight_scale",)
        return Scheme(suffixes, needed, _read_int8, _plain_shape, activations=bool(dynamic))
    if form == "float-quantized":
        return fp8.compressed(groups)
    if dynamic:
        raise un.Unfit(f"`{form}` with rounded activations")
    if form == "pack-quantized":
        suffixes = re.compile(
            r"\.(weight_packed|weight_scale|weight_zero_point|weight_shape|weight_g_idx)$"
        )
        return Scheme(suffixes, ("weight_packed",), _read_packed, _packed_shape)
    if form == "mxfp4-pack-quantized":
        suffixes = re.compile(r"\.(weight_packed|weight_scale)$")
        return Scheme(suffixes, ("weight_packed",), _read_mxfp4, _mxfp4_shape)
    raise un.Unfit(f"compressed-tensors of the form `{form}`")


def _plain_shape(matrix: PackedMatrix) -> tuple[int, ...]:
    return matrix.stored_shape("weight")


def _packed_shape(matrix: PackedMatrix) -> tuple[int, ...]:
    rows, k = matrix.array("weight_shape")
    return int(rows), int(k)


def _mxfp4_shape(matrix: PackedMatrix) -> tuple[int, ...]:
    *lead, pairs = matrix.stored_shape("weight_packed")
    return (*lead, 2 * pairs)


def _blocks_shape(matrix: PackedMatrix) -> tuple[int, ...]:
    *lead, blocks, pairs = matrix.stored_shape("blocks")
    return (*lead, 2 * blocks * pairs)


def _read_int8(matrix: PackedMatrix) -> QuantTensor:
    values, scale = matrix.array("weight"), un.floats(matrix.array("weight_scale"))
    if str(values.dtype) != "int8" or scale.size not in (1, values.shape[0]):
        raise un.Unfit(f"values are {values.dtype} {values.shape}, scales {scale.shape}")
    if "weight_zero_point" in matrix.tensors and matrix.array("weight_zero_point").any():
        raise un.Unfit("its int8 values have zero points")
    return QuantTensor(
        format="W8A8" if matrix.scheme.activations else "W8A16",
        shape=values.shape,
        data=values.reshape(-1).view("uint8"),
        name=matrix.name,
        aux={"scale": un.per_row(scale, values.shape[0])},
    )


def _read_packed(matrix: PackedMatrix) -> QuantTensor:
    """Little-endian fields along K, stored as code = value + 2^(bits - 1)."""
    words, scale = matrix.array("weight_packed"), matrix.array("weight_scale")
    rows, k = (int(n) for n in matrix.array("weight_shape"))
    bits = 32 * words.shape[1] // max(k, 1)
    if words.shape[0] != rows or bits not in (4, 8) or k % (32 // bits):
        raise un.Unfit(f"{rows} rows of {k} in words {words.shape}")
    if bits == 8:
        if scale.shape != (rows, 1) or "weight_zero_point" in matrix.tensors:
            raise un.Unfit("int8 values with groups or zero points")
        values = (words.view("uint8") ^ 128).view("int8")
        aux = {"scale": un.per_row(un.floats(scale), rows)}
        data = values.reshape(-1).view("uint8")
        return QuantTensor(format="W8A16", shape=(rows, k), data=data, name=matrix.name, aux=aux)
    zero = None
    if "weight_zero_point" in matrix.tensors:
        zero = un.nibbles(matrix.array("weight_zero_point").T).T[:rows]
    order = matrix.array("weight_g_idx") if "weight_g_idx" in matrix.tensors else None
    return _int4(matrix, un.nibbles(words), scale, zero, order)


def _read_mxfp4(matrix: PackedMatrix) -> QuantTensor:
    codes, exponents = (matrix.array(name) for name in ("weight_packed", "weight_scale"))
    return _mxfp4(matrix, codes, exponents)


def _read_mxfp4_blocks(matrix: PackedMatrix) -> QuantTensor:
    codes, exponents = matrix.array("blocks"), matrix.array("scales")
    return _mxfp4(matrix, codes.reshape(*codes.shape[:-2], -1), exponents)


def _mxfp4(matrix: PackedMatrix, codes: un.Array, exponents: un.Array) -> QuantTensor:
    if codes.shape != (*exponents.shape[:-1], exponents.shape[-1] * 16):
        raise un.Unfit(f"codes are {codes.shape}, exponents {exponents.shape}")
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    data = un.mxfp4_blocks(codes, exponents)
    return QuantTensor(format="MXFP4", shape=shape, data=data, name=matrix.name)


_MXFP4_BLOCKS = Scheme(
    re.compile(r"_(blocks|scales)$"), ("blocks",), _read_mxfp4_blocks, _blocks_shape
)
_SCHEMES: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": fp8.finegrained,
    "fbgemm_fp8": fp8.finegrained,
    "mxfp4": lambda _: _MXFP4_BLOCKS,
}
