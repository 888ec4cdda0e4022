"""Quantising a directory of safetensors layer by layer, and how far each layer is then off."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import yaml

from halogen_core.errors import ConfigError, ModelError
from halogen_core.loader.hf_config import read_json
from halogen_core.loader.int8 import CONFIG_KEY, SCALES_FILE, quantize_rows, signal_to_noise
from halogen_core.loader.safetensors import SafetensorsFile, read_safetensors
from halogen_core.spi.arrays import Float32

LAYERS: Mapping[str, str] = {
    "embedding": r"embed_tokens\.weight$",
    "output": r"lm_head\.weight$",
    "attention.qkv": r"self_attn\.[qkv]_proj\.weight$",
    "attention.out": r"self_attn\.o_proj\.weight$",
    "ffn.w1": r"mlp\.(gate|up)_proj\.weight$",
    "ffn.w2": r"mlp\.down_proj\.weight$",
}
"""Layer names of a quant config -> Hugging Face keys. `ffn.w1` is gate and up: packed as one."""
FORMATS = ("fp16", "w8a8", "w8a16")
_FIXED = ("embedding", "output")
"""Rows are looked up, and logits decide tokens: these stay as they are."""
_COPIED = ("*.json", "*.model", "*.jinja", "*.txt")
_REPORT = "quant_report.json"
LEAST_DB = 20.0


@attrs.frozen
class QuantPlan:
    """Format by layer name; what is not named stays as it is."""

    formats: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> QuantPlan:
        """From a YAML file; raises `ConfigError` (HRT-2012) naming the entry at fault."""
        try:
            table = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
            raise _wrong(f"quant config `{path}` cannot be read: {exc}") from exc
        if not isinstance(table, dict) or not table:
            raise _wrong(f"quant config `{path}` is not a table of layer: format")
        return cls.of(table)

    @classmethod
    def of(cls, table: Mapping[Any, Any]) -> QuantPlan:
        """Checked; nested tables (`attention: {qkv: w8a8}`) are flattened."""
        flat = dict(_flatten(table))
        for name, form in flat.items():
            if name not in LAYERS:
                near = difflib.get_close_matches(name, LAYERS, n=1)
                hint = f"; did you mean `{near[0]}`" if near else ""
                raise _wrong(f"layer `{name}` is unknown{hint}; known: {', '.join(LAYERS)}")
            if form not in FORMATS:
                raise _wrong(f"layer `{name}` has format `{form}`; known: {', '.join(FORMATS)}")
            if name in _FIXED and form != "fp16":
                raise _wrong(f"layer `{name}` has format `{form}`; it must stay fp16")
        return cls(flat)

    @classmethod
    def whole(cls, form: str) -> QuantPlan:
        """Every linear layer in one format."""
        return cls.of({name: "fp16" if name in _FIXED else form for name in LAYERS})

    def format_of(self, key: str) -> str:
        """For a tensor's Hugging Face key."""
        for name, pattern in LAYERS.items():
            if re.search(pattern, key):
                return self.formats.get(name, "fp16")
        return "fp16"


def convert_directory(source: Path, target: Path, plan: QuantPlan) -> dict[str, float]:
    """Write `source` to `target` under `plan`; signal over noise in dB of each int8 tensor.

    The target appears whole or not at all. Raises `ModelError` (HRT-2015) when a tensor loses more
    than 20 dB allow, before anything is written.
    """
    if target.exists():
        raise ConfigError(
            f"`{target}` exists already", code="HRT-2012", fix="choose another folder or remove it"
        )
    from safetensors.numpy import save_file

    tensors, scales, schemes, report = _quantized(_files(source), plan)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        save_file(tensors, partial / "model.safetensors")
        if scales:
            save_file(scales, partial / SCALES_FILE)
        _copy_rest(source, partial, schemes)
        (partial / _REPORT).write_text(json.dumps({"snr_db": report}, indent=1), encoding="utf-8")
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def _quantized(
    files: list[SafetensorsFile], plan: QuantPlan
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str], dict[str, float]]:
    tensors: dict[str, Any] = {}
    scales: dict[str, Any] = {}
    schemes: dict[str, str] = {}
    report: dict[str, float] = {}
    for file in files:
        for key, entry in file.tensors.items():
            form = plan.format_of(key)
            if form == "fp16":
                tensors[key] = _as_stored(file, key)
                continue
            values = _floats(file, key)
            tensors[key], scales[key] = quantize_rows(values)
            schemes[key] = form.upper()
            report[key] = round(signal_to_noise(values, tensors[key], scales[key]), 2)
            if report[key] < LEAST_DB:
                raise ModelError(
                    f"`{key}` {list(entry.shape)} as {form} keeps {report[key]} dB over its "
                    f"rounding error, {LEAST_DB:g} are wanted",
                    code="HRT-2015",
                    fix="keep this layer fp16 in the quant config",
                )
    return tensors, scales, schemes, report


def _as_stored(file: SafetensorsFile, key: str) -> Any:
    entry = file.tensors[key]
    if entry.dtype != "F16":
        # numpy has no bfloat16; float32 holds every value of it
        return _floats(file, key)
    return file.view(key).view(np.float16).reshape(entry.shape)


def _floats(file: SafetensorsFile, key: str) -> Float32:
    entry, data = file.tensors[key], file.view(key)
    if entry.dtype == "BF16":
        values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif entry.dtype in ("F16", "F32"):
        values = data.view(np.float16 if entry.dtype == "F16" else np.float32)
    else:
        raise ModelError(
            f"tensor `{key}` is {entry.dtype}; only F16, BF16 and F32 can be quantised",
            code="HRT-2006",
            fix="convert the original model, not one that is quantised already",
        )
    return values.astype(np.float32).reshape(entry.shape)


def _files(source: Path) -> list[SafetensorsFile]:
    if not (source / "config.json").is_file():
        raise ModelError(
            f"`{source}` is not a directory with config.json and safetensors",
            code="HRT-2012",
            fix="GGUF models are quantised already; convert the original",
        )
    config = read_json(source / "config.json")
    if config.get("quantization_config"):
        raise ModelError(
            f"`{source}` is quantised already: {_method(config['quantization_config'])}",
            code="HRT-2012",
            fix="convert the original model; rounding twice would lose more than either",
        )
    return [read_safetensors(path) for path in sorted(source.glob("*.safetensors"))]


def _method(given: Any) -> str:
    return f"`{given.get('quant_method')}`" if isinstance(given, dict) else "by an unknown method"


def _copy_rest(source: Path, target: Path, schemes: Mapping[str, str]) -> None:
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.name not in ("config.json", "model.safetensors.index.json"):
                shutil.copyfile(path, target / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config[CONFIG_KEY] = dict(schemes)
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _flatten(table: Mapping[Any, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", value


def _wrong(text: str) -> ConfigError:
    return ConfigError(text, code="HRT-2012", fix="see `halogen convert --help`")
