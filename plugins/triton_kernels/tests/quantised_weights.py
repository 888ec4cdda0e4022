"""Random weights in every packed format, with their values in float64 by formats' definitions."""

import gguf
import numpy as np

from halogen_core.spi import FORMATS, QuantTensor

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SCALES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q6_K": (208,)}


def random_weight(form, *shape, seed=0, group=128, zeros=True, order=False, scale=np.float16):
    """(QuantTensor, values float64 [*shape]) of random bits with sane scales."""
    rng = np.random.default_rng(seed)
    if form == "INT4":
        data, aux, values = _int4(rng, shape, group, zeros, order, scale)
    else:
        made = {"W8A16": _int8, "W8A8": _int8, "MXFP4": _mxfp4}.get(form, _gguf)
        data, aux, values = made(rng, shape, form)
    return QuantTensor(format=form, shape=shape, data=data, name="w", aux=aux), values


def _gguf(rng, shape, form):
    fmt = FORMATS[form]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // fmt.block, fmt.bytes), dtype=np.uint8)
    for at in SCALES_AT.get(form, (0,)):
        value = rng.uniform(0.5, 1.5, raw.shape[:-1]).astype(np.float16) / 64
        raw[..., at : at + 2] = value[..., None].view(np.uint8)
    kind = gguf.GGMLQuantizationType(fmt.ggml_type)
    values = gguf.dequantize(raw.reshape(-1, raw.shape[-2] * raw.shape[-1]), kind)
    return raw.reshape(-1), {}, values.reshape(shape).astype(np.float64)


def _int4(rng, shape, group, zeros, order, kind):
    *lead, k = shape
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    aux = {"scale": (rng.uniform(0.5, 1.5, (*lead, k // group)) / 64).astype(kind)}
    zero = np.full((*lead, k // group), 8, np.uint8)
    if zeros:
        zero = aux["zero"] = rng.integers(0, 16, zero.shape, dtype=np.uint8)
    wide = codes - zero.repeat(group, -1).astype(np.float64)
    stored = wide * aux["scale"].astype(np.float64).repeat(group, -1)
    values = stored
    if order:
        aux["perm"] = rng.permutation(k).astype(np.int32)
        values = np.empty_like(stored)
        values[..., aux["perm"]] = stored
    return (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(-1), aux, values


def _int8(rng, shape, _):
    codes = rng.integers(-127, 128, shape).astype(np.int8)
    scale = (rng.uniform(0.5, 1.5, shape[:-1]) / 512).astype(np.float32)
    values = codes.astype(np.float64) * scale[..., None].astype(np.float64)
    return codes.reshape(-1).view(np.uint8), {"scale": scale}, values


def _mxfp4(rng, shape, _):
    *lead, k = shape
    raw = rng.integers(0, 256, (*lead, k // 32, 17), dtype=np.uint8)
    raw[..., 0] = rng.integers(118, 125, raw.shape[:-1])
    codes = np.concatenate([raw[..., 1:] & 15, raw[..., 1:] >> 4], -1)
    values = E2M1[codes] * 2.0 ** (raw[..., :1].astype(np.float64) - 127)
    return raw.reshape(-1), {}, values.reshape(shape)
