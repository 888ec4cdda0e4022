"""Tiny llamas in the vendors' quantised forms, packed here by definition, one code at a time."""

import json

import numpy as np
from safetensors.numpy import save_file
from tiny_files import HF_CONFIG, hf_name

INNER, GROUP = 64, 16
AWQ_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def words(codes, bits=4):
    """int32 words of codes along the last axis, little-endian."""
    per = 32 // bits
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] // per), np.uint32)
    for at in np.ndindex(codes.shape):
        *lead, i = at
        out[(*lead, i // per)] |= np.uint32(int(codes[at]) << (bits * (i % per)))
    return out.view(np.int32)


def awq_words(codes):
    """int32 words of codes [A, B] along B in AWQ's order."""
    shuffled = np.empty_like(codes)
    for column in range(codes.shape[1]):
        block, i = divmod(column, 8)
        shuffled[:, 8 * block + AWQ_COLUMN.index(i)] = codes[:, column]
    return words(shuffled)


class Packer:
    """Makes random matrices in one form; `values` keeps what each stands for, in float64."""

    def __init__(self, form, seed=0, *, group=GROUP, symmetric=False, act_order=False):
        self.form, self.random = form, np.random.default_rng(seed)
        self.group, self.symmetric, self.act_order = group, symmetric, act_order
        self.values = {}

    def __call__(self, name, n, k):
        """Stored tensors of matrix `name` (without `.weight`)."""
        made, self.values[name] = getattr(self, self.form)(n, k)
        return {f"{name}.{suffix}": np.ascontiguousarray(t) for suffix, t in made.items()}

    def _int4(self, n, k):
        groups = k // self.group
        codes = self.random.integers(0, 16, (n, k), dtype=np.uint8)
        zero = self.random.integers(1, 16, (n, groups), dtype=np.uint8)
        zero = np.full_like(zero, 8) if self.symmetric else zero
        scale = (self.random.uniform(0.5, 1.5, (n, groups)) / 64).astype(np.float16)
        index = np.arange(k) // self.group
        if self.act_order:
            self.random.shuffle(index)
        value = (codes.astype(np.float64) - zero[:, index]) * scale.astype(np.float64)[:, index]
        return codes, zero, scale, index.astype(np.int32), value

    def awq(self, n, k):
        codes, zero, scale, _, value = self._int4(n, k)
        made = {"qweight": awq_words(codes.T), "qzeros": awq_words(zero.T), "scales": scale.T}
        return made, value

    def gptq(self, n, k):
        codes, zero, scale, index, value = self._int4(n, k)
        stored = zero if self.form == "gptq_v2" else (zero - 1) & 15
        made = {"qweight": words(codes).T, "qzeros": words(stored.T), "scales": scale.T}
        return {**made, "g_idx": index}, value

    gptq_v2 = gptq

    def packed(self, n, k):
        codes, zero, scale, index, value = self._int4(n, k)
        made = {"weight_packed": words(codes), "weight_scale": scale}
        made["weight_shape"] = np.array([n, k], np.int64)
        if not self.symmetric:
            made["weight_zero_point"] = words(zero.T).T
        if self.act_order:
            made["weight_g_idx"] = index
        return made, value

    def packed8(self, n, k):
        codes = self.random.integers(0, 256, (n, k), dtype=np.uint8)
        scale = (self.random.uniform(0.5, 1.5, (n, 1)) / 512).astype(np.float16)
        made = {"weight_packed": words(codes, 8), "weight_scale": scale}
        made["weight_shape"] = np.array([n, k], np.int64)
        return made, (codes.astype(np.float64) - 128) * scale

    def int8(self, n, k):
        codes = self.random.integers(-127, 128, (n, k)).astype(np.int8)
        scale = (self.random.uniform(0.5, 1.5, (n, 1)) / 512).astype(np.float32)
        return {"weight": codes, "weight_scale": scale}, codes.astype(np.float64) * scale

    def mxfp4(self, n, k):
        codes = self.random.integers(0, 16, (n, k), dtype=np.uint8)
        exponent = self.random.integers(119, 123, (n, k // 32), dtype=np.uint8)
        both = codes[:, 0::2] | codes[:, 1::2] << 4
        table = np.array([*E2M1, *(-v for v in E2M1)])
        value = table[codes] * 2.0 ** (exponent.repeat(32, 1).astype(np.float64) - 127)
        return {"weight_packed": both, "weight_scale": exponent}, value


def quantisation(form, packer):
    """config.json's `quantization_config` for a form."""
    group = packer.group
    if form == "awq":
        return {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group}
    if form.startswith("gptq"):
        own = {"quant_method": "gptq", "bits": 4, "group_size": group}
        return {**own, "desc_act": packer.act_order, "checkpoint_format": form}
    inputs = {"num_bits": 8, "dynamic": True, "strategy": "token"} if form == "int8" else None
    kinds = {"int8": "int-quantized", "mxfp4": "mxfp4-pack-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": kinds.get(form, "pack-quantized"),
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": inputs}},
        "ignore": ["lm_head"],
    }


def write_packed(directory, packer, shapes, **config):
    """A llama directory with `shapes` (GGUF name -> shape), its layers' matrices quantised."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, shape in shapes.items():
        key = hf_name(name)
        if len(shape) == 2 and name.startswith("blk."):
            tensors |= packer(key.removesuffix(".weight"), *shape)
        else:
            scale = 1.0 if len(shape) == 2 else 0.1
            values = packer.random.standard_normal(shape) * scale + (len(shape) == 1)
            tensors[key] = values.astype(np.float16)
    save_file(tensors, directory / "model.safetensors")
    own = {"quantization_config": quantisation(packer.form, packer)}
    (directory / "config.json").write_text(json.dumps({**HF_CONFIG, **own, **config}))
    return directory
