"""Directories with weights in fp8, in their makers' layouts; what each code means by definition."""

import json
from fractions import Fraction

import numpy as np
import torch
from safetensors.torch import save_file

from halogen_core.spi import QuantTensor

KINDS = {"F8_E4M3": (torch.float8_e4m3fn, 4, 7), "F8_E5M2": (torch.float8_e5m2, 5, 15)}


def meaning(kind, code):
    """One code as a float, None: no number. OFP8, section 5: e4m3 has NaN at all ones alone."""
    _, exponent_bits, bias = KINDS[kind]
    mantissa_bits = 7 - exponent_bits
    exponent, fraction = (code & 127) >> mantissa_bits, code & (2**mantissa_bits - 1)
    if exponent == 2**exponent_bits - 1 and (kind == "F8_E5M2" or fraction == 7):
        return None
    share = Fraction(fraction, 2**mantissa_bits)
    if exponent == 0:
        value = share * Fraction(2) ** (1 - bias)
    else:
        value = (1 + share) * Fraction(2) ** (exponent - bias)
    return -float(value) if code & 128 else float(value)


def table(kind):
    """Values of all codes; NaN for those that are no numbers."""
    found = [meaning(kind, code) for code in range(256)]
    return np.array([np.nan if value is None else value for value in found])


def numbers(kind):
    """The codes that are numbers."""
    return np.flatnonzero(np.isfinite(table(kind))).astype(np.uint8)


def spread(scale, block, shape):
    """Scales [G, H] of blocks as one for each element of `shape`."""
    rows = np.arange(shape[0]) // block[0]
    columns = np.arange(shape[1]) // block[1]
    return scale[rows][:, columns]


def nearest(kind, values):
    """The codes of the numbers next to `values`; the smallest ones become a negative zero."""
    codes = numbers(kind)
    codes = codes[np.argsort(table(kind)[codes], kind="stable")]
    sorted_values = table(kind)[codes]
    at = np.searchsorted((sorted_values[1:] + sorted_values[:-1]) / 2, values)
    found = codes[at]
    return np.where(found == 0, np.uint8(128), found)


FORMS = {
    "compressed per tensor, static": {"vendor": "compressed", "block": None, "static": True},
    "compressed per channel": {"vendor": "compressed", "block": (1, 0), "scale": "BF16"},
    "compressed blocks": {"vendor": "compressed", "block": (128, 128), "scale": "BF16"},
    "transformers blocks": {"vendor": "transformers", "block": (128, 128)},
    "transformers per tensor, static": {"vendor": "transformers", "block": None, "static": True},
    "odd blocks": {"vendor": "transformers", "block": (48, 56), "scale": "F16"},
    "powers of two": {"vendor": "transformers", "block": (128, 128), "scale": "F8_E8M0"},
    "vllm per tensor, static": {"vendor": "vllm", "block": None, "static": True},
    "fbgemm": {"vendor": "fbgemm", "block": (1, 0)},
    "e5m2": {"vendor": "transformers", "block": (128, 128), "kind": "F8_E5M2"},
    "no scales": {"vendor": "plain", "block": None, "kind": "F8_E5M2"},
}


def random_matrix(rng, kind, shape, block, size=0.01):
    """(codes, scales, values float64) of [..., N, K]: every kind of code, each scale its own."""
    codes = rng.choice(numbers(kind), shape)
    *lead, n, k = shape
    grid = (*lead, -(-n // block[0]), -(-k // block[1]))
    scale = (rng.uniform(0.5, 1.5, grid) * size).astype(np.float32)
    wide = [spread(one.astype(np.float64), block, (n, k)) for one in scale.reshape(-1, *grid[-2:])]
    return codes, scale, table(kind)[codes] * np.stack(wide).reshape(shape)


def float8_tensor(rng, kind, shape, block, size=0.01):
    """(QuantTensor in canonical form, its values float64)."""
    codes, scale, values = random_matrix(rng, kind, shape, block, size)
    aux = {"scale": scale, "block": np.array(block, np.int32)}
    data = codes.reshape(-1)
    return QuantTensor(format=kind, shape=tuple(shape), data=data, name="w", aux=aux), values


class Fp8:
    """Rounds matrices to one form; `values` keeps what each stands for, in float64."""

    def __init__(self, form):
        self.form, self.values = form, {}
        options = FORMS[form]
        self.vendor, self.block = options["vendor"], options["block"]
        self.kind, self.scale = options.get("kind", "F8_E4M3"), options.get("scale", "F32")
        self.static = options.get("static", False)

    def __call__(self, name, values):
        """Stored tensors of the matrix `name` (without `.weight`) that is next to `values`."""
        block = self.block_of(values.shape)
        scale = self._scales(values, block)
        wide = spread(scale, block, values.shape)
        codes = nearest(self.kind, values / wide)
        self.values[name] = table(self.kind)[codes] * wide
        made = {"weight": torch.from_numpy(codes).view(KINDS[self.kind][0])}
        inverse = self.vendor == "transformers"
        if self.vendor != "plain":
            made["weight_scale_inv" if inverse else "weight_scale"] = self._stored(scale)
        if self.static:
            made["activation_scale" if inverse else "input_scale"] = torch.tensor(0.02)
        return {f"{name}.{suffix}": tensor for suffix, tensor in made.items()}

    def block_of(self, shape):
        if self.block is None:
            return shape
        return self.block[0], self.block[1] or shape[1]

    def _scales(self, values, block):
        grid = tuple(-(-size // part) for size, part in zip(values.shape, block, strict=True))
        if self.vendor == "plain":
            return np.ones(grid)
        largest = np.zeros(grid)
        for at in np.ndindex(grid):
            part = tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, block, strict=True))
            largest[at] = np.abs(values[part]).max()
        scale = torch.from_numpy(largest / np.nanmax(table(self.kind)))
        if self.scale == "F8_E8M0":
            return 2.0 ** np.ceil(np.log2(scale.numpy()))
        kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        return scale.to(kinds[self.scale]).double().numpy()

    def _stored(self, scale):
        if self.scale == "F8_E8M0":
            exponents = (np.log2(scale) + 127).astype(np.uint8)
            return torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
        kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        stored = torch.from_numpy(scale).to(kinds[self.scale])
        return stored.reshape(()) if self.block is None and self.vendor != "compressed" else stored

    def quantisation(self):
        """config.json's `quantization_config`."""
        if self.vendor == "fbgemm":
            return {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
        if self.vendor == "compressed":
            return self._compressed()
        how = "static" if self.static else "dynamic"
        own = {"quant_method": "fp8", "activation_scheme": how}
        if self.vendor == "vllm":
            return {**own, "ignored_layers": ["lm_head"]}
        fmt = {"fmt": "e5m2"} if self.kind == "F8_E5M2" else {}
        block = None if self.block is None else list(self.block)
        return {**own, **fmt, "weight_block_size": block, "modules_to_not_convert": ["lm_head"]}

    def _compressed(self):
        strategies = {None: "tensor", (1, 0): "channel"}
        strategy = strategies.get(self.block, "block")
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
        weights |= {"strategy": strategy, "group_size": None}
        weights["block_structure"] = list(self.block) if strategy == "block" else None
        inputs = {"num_bits": 8, "type": "float", "dynamic": not self.static}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }


def write_fp8(directory, rounder, state, config):
    """A directory of `state` (Hugging Face name -> float array), its linear layers in fp8."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, values in state.items():
        if values.ndim == 2 and "_proj." in key:
            tensors |= rounder(key.removesuffix(".weight"), values.astype(np.float64))
        else:
            tensors[key] = torch.from_numpy(values)
    save_file(tensors, directory / "model.safetensors")
    own = {} if rounder.vendor == "plain" else {"quantization_config": rounder.quantisation()}
    (directory / "config.json").write_text(json.dumps({**config, **own}))
    return directory
