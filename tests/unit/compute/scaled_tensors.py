"""Tensors with scales beside their codes, and the float64 values they stand for."""

import numpy as np

from halogen_core.spi import QuantTensor

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def int4(rng, shape, group, *, zero=True, perm=False, scale_dtype=np.float16):
    *lead, k = shape
    codes = rng.integers(0, 16, shape)
    scale = (rng.uniform(0.5, 1.5, (*lead, k // group)) / 64).astype(scale_dtype)
    zeros = rng.integers(0, 16, scale.shape) if zero else np.full(scale.shape, 8)
    values = (codes - np.repeat(zeros, group, -1)) * np.repeat(scale.astype(np.float64), group, -1)
    aux = {"scale": scale}
    if zero:
        aux["zero"] = zeros.astype(np.uint8)
    if perm:
        aux["perm"] = rng.permutation(k).astype(np.int32)
        natural = np.empty_like(values)
        natural[..., aux["perm"]] = values
        values = natural
    data = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8).reshape(-1)
    return QuantTensor(format="INT4", shape=tuple(shape), data=data, name="w", aux=aux), values


def int8(rng, shape, form="W8A16", scale=None):
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    if scale is None:
        scale = rng.uniform(0.5, 1.5, shape[:-1]).astype(np.float32) / 100
    values = codes * scale.astype(np.float64)[..., None]
    data = codes.reshape(-1).view(np.uint8)
    aux = {"scale": scale}
    return QuantTensor(format=form, shape=tuple(shape), data=data, name="w", aux=aux), values


def mxfp4(rng, shape, exponents=(118, 130)):
    blocks = int(np.prod(shape)) // 32
    raw = rng.integers(0, 256, (blocks, 17), dtype=np.uint8)
    raw[:, 0] = rng.integers(*exponents, blocks)
    codes = np.concatenate([raw[:, 1:] & 15, raw[:, 1:] >> 4], 1)
    values = E2M1[codes] * 2.0 ** (raw[:, :1].astype(np.float64) - 127)
    data = raw.reshape(-1)
    tensor = QuantTensor(format="MXFP4", shape=tuple(shape), data=data, name="w")
    return tensor, values.reshape(shape)
