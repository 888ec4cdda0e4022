"""config.json of a Hugging Face model, in GGUF's vocabulary."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from halogen_core.errors import ModelError
from halogen_core.loader.architecture import ARCHITECTURES
from halogen_core.loader.failures import missing
from halogen_core.loader.quantised import read_scheme
from halogen_core.spi.arrays import Float32

_MAX_JSON_BYTES = 64_000_000
_ARCHITECTURE_OF = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}
_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "vocab_size": "vocab_size",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # What transformers assumes where config.json is silent; only Gemma's files rely on much of it.
    "": {"rms_norm_eps": 1e-6, "hidden_act": "silu"},
    "mistral": {"sliding_window": 4096},
    "gemma3_text": {
        "hidden_act": "gelu_pytorch_tanh",
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
}


@attrs.frozen(kw_only=True, eq=False)
class HFConfig:
    """What a checkpoint needs to know of config.json."""

    architecture: str
    hparams: Mapping[str, Any]
    tied_embeddings: bool
    rope_freqs: Float32 | None
    """[D / 2] divisors of the rotary frequencies (Llama 3.1), as GGUF's `rope_freqs.weight`."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises `ModelError`."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise unusable(path, f"it is larger than {_MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise missing(path, exc.strerror or str(exc)) from exc
    except (ValueError, RecursionError) as exc:
        raise unusable(path, "it is not JSON") from exc
    if not isinstance(value, dict):
        raise unusable(path, "it is not a JSON object")
    return value


def unusable(path: Path, reason: str) -> ModelError:
    """A configuration file that does not say what is needed."""
    return ModelError(
        f"`{path}` cannot be used: {reason}",
        code="HRT-2014",
        fix="download the model again, or take a GGUF conversion of it",
    )


def read_config(path: Path) -> HFConfig:
    """Translate config.json; raises `ModelError` for what halogen would compute wrongly."""
    outer = read_json(path)
    read_scheme(path, outer)  # refuses what is quantised in a way that is not read
    model_type = outer.get("model_type")
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURE_OF:
        raise ModelError(
            f"`{path}` has the model type `{model_type}`; halogen runs "
            f"{', '.join(_ARCHITECTURE_OF)}",
            code="HRT-2005",
            fix="take a model of one of these families",
        )
    inner = outer.get("text_config", {})
    given = {**outer, **(inner if isinstance(inner, dict) else {})}
    kind = "gemma3_text" if model_type == "gemma3" else model_type
    present = {key: value for key, value in given.items() if value is not None}
    config = {**_DEFAULTS[""], **_DEFAULTS.get(kind, {}), **present}
    if "sliding_window" in given:
        config["sliding_window"] = given["sliding_window"]
    try:
        return _translate(path, config, kind)
    except (TypeError, ValueError, KeyError, ZeroDivisionError, OverflowError) as exc:
        raise unusable(path, f"a value is missing or malformed ({exc})") from exc


def _translate(path: Path, config: Mapping[str, Any], kind: str) -> HFConfig:
    architecture = _ARCHITECTURE_OF[kind]
    _refuse_unlike(path, config, architecture)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    hparams: dict[str, Any] = {
        ours: config[theirs] for theirs, ours in _KEYS.items() if theirs in config
    }
    hparams["attention.key_length"] = hparams["attention.value_length"] = head_dim
    hparams["rope.dimension_count"] = int(head_dim * config.get("partial_rotary_factor", 1.0))
    if kind == "mixtral":
        hparams["expert_weights_norm"] = True
    if "query_pre_attn_scalar" in config:
        hparams["attention.scale"] = config["query_pre_attn_scalar"] ** -0.5
    hparams |= _window(config, kind)
    full, local = _rope_parameters(config)
    hparams["rope.freq_base"] = float(full["rope_theta"])
    if architecture == "gemma3":
        hparams["rope.freq_base_swa"] = float(local["rope_theta"])
    rope_type = full.get("rope_type") or full.get("type") or "default"
    if rope_type == "llama3":
        rope_freqs = llama3_rope_freqs(full, dim=hparams["rope.dimension_count"])
    else:
        rope_freqs = None
        hparams |= _rope_scaling(path, config, full, rope_type)
    return HFConfig(
        architecture=architecture,
        hparams=hparams,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope_freqs=rope_freqs,
    )


def _refuse_unlike(path: Path, config: Mapping[str, Any], architecture: str) -> None:
    """Variants that the shared decoder would run without complaint and wrongly."""
    activation = config.get("hidden_activation") or config["hidden_act"]
    due = "gelu_pytorch_tanh" if ARCHITECTURES[architecture].post_norms else "silu"
    if activation != due:
        raise unusable(path, f"`hidden_act` is `{activation}`; `{due}` is expected")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise unusable(path, "it mixes dense and expert layers")
    if config.get("use_bidirectional_attention"):
        raise unusable(path, "its attention is bidirectional")


def _window(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Sliding window and, per layer, whether it applies."""
    window, layers = config.get("sliding_window"), int(config["num_hidden_layers"])
    if not window or config.get("use_sliding_window") is False:
        return {}
    if "layer_types" in config:
        pattern = [name == "sliding_attention" for name in config["layer_types"]]
    elif kind == "gemma3_text":
        period = config["sliding_window_pattern"]
        pattern = [(layer + 1) % period != 0 for layer in range(layers)]
    elif kind in ("mistral", "mixtral"):
        pattern = [True] * layers
    else:
        first = config.get("max_window_layers", 0) if config.get("use_sliding_window") else layers
        pattern = [layer >= first for layer in range(layers)]
    if not any(pattern):
        return {}
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": pattern}


def _rope_parameters(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(of full attention, of sliding attention); the spelling changed with transformers 5."""
    theta = {"rope_theta": config.get("rope_theta", 10_000.0)}
    local = {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
    new = config.get("rope_parameters") or {}
    if "full_attention" in new:
        return theta | new["full_attention"], local | new.get("sliding_attention", {})
    return theta | (config.get("rope_scaling") or {}) | new, local


def _rope_scaling(
    path: Path, config: Mapping[str, Any], rope: Mapping[str, Any], rope_type: str
) -> dict[str, Any]:
    if rope_type == "default":
        return {}
    if rope_type not in ("linear", "yarn"):
        raise unusable(
            path, f"rope scaling `{rope_type}`; default, linear, llama3 and yarn are known"
        )
    factor = float(rope["factor"])
    scaling = {"rope.scaling.type": rope_type, "rope.scaling.factor": factor}
    if rope_type == "linear":
        return scaling
    if "mscale" in rope or "mscale_all_dim" in rope:
        raise unusable(path, "yarn with `mscale`")
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    scaling["rope.scaling.original_context_length"] = original
    for bound in ("beta_fast", "beta_slow"):
        if rope.get(bound) is not None:
            scaling[f"rope.scaling.yarn_{bound}"] = float(rope[bound])
    if rope.get("attention_factor") is not None:
        # GGUF's factor multiplies YaRN's own magnitude, Hugging Face's replaces it.
        own = 0.1 * math.log(factor) + 1.0
        scaling["rope.scaling.attn_factor"] = float(rope["attention_factor"]) / own
    return scaling


def llama3_rope_freqs(rope: Mapping[str, Any], *, dim: int) -> Float32:
    """Divisors [dim / 2] of rotary frequencies (Llama 3.1): `factor` for long waves, else 1."""
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    waves = 2 * np.pi * float(rope["rope_theta"]) ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)
