"""What a checkpoint must be before it is believed: numbers in range, every tensor, none unknown.

A tensor that a definition does not know (a bias, a norm) would be left out silently and the answers
be wrong; here it is refused. Architectures that plugins bring check themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from halogen_core.loader.failures import unfit
from halogen_core.spi.model import Checkpoint
from halogen_core.spi.operations import RopeStyle


@attrs.frozen(kw_only=True)
class Architecture:
    """How one architecture departs from the plain decoder of RMSNorm, rotary GQA and gated MLP."""

    gguf_rope_style: RopeStyle = RopeStyle.NEOX
    qkv_bias: bool = False
    optional_biases: bool = False
    qk_norm: bool = False
    post_norms: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(gguf_rope_style=RopeStyle.INTERLEAVED, optional_biases=True),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qk_norm=True),
    "qwen3moe": Architecture(qk_norm=True),
    "gemma3": Architecture(qk_norm=True, post_norms=True),
}


# ---------------------------------------------------------------- hyper-parameters

_MANY = 1 << 31
_INTEGERS = {  # key -> (least, most, may be one value per layer)
    "block_count": (1, 512, False),
    "context_length": (1, _MANY, False),
    "embedding_length": (1, 1 << 20, False),
    "vocab_size": (1, 1 << 24, False),
    "feed_forward_length": (1, 1 << 24, True),
    "attention.head_count": (1, 1 << 16, True),
    "attention.head_count_kv": (1, 1 << 16, True),
    "attention.key_length": (2, 1 << 16, False),
    "attention.value_length": (2, 1 << 16, False),
    "attention.sliding_window": (0, _MANY, False),
    "rope.dimension_count": (2, 1 << 16, False),
    "rope.scaling.original_context_length": (1, _MANY, False),
    "expert_count": (0, 1 << 12, False),
    "expert_used_count": (0, 1 << 12, False),
    "expert_feed_forward_length": (1, 1 << 24, False),
}
_POSITIVE = (
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
)
_POSITIVE_OR_OFF = (
    "attention.scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
)
"""0 means: not used."""
_REQUIRED = (
    "block_count",
    "context_length",
    "embedding_length",
    "vocab_size",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)


def _check_hparams(hparams: Mapping[str, Any], path: str) -> None:
    for key in _REQUIRED:
        if key not in hparams:
            raise unfit(path, f"hyper-parameter `{key}` is missing")
    for key, (least, most, per_layer) in _INTEGERS.items():
        for value in _values(hparams, key, path, per_layer=per_layer):
            if type(value) is not int or not least <= value <= most:
                raise unfit(path, f"`{key}` is {value!r}; an integer in {least} … {most} is needed")
    for key in (*_POSITIVE, *_POSITIVE_OR_OFF):
        value = hparams.get(key, 1.0)
        allowed = type(value) in (int, float) and math.isfinite(value) and value >= 0
        if not allowed or (value == 0 and key in _POSITIVE):
            raise unfit(path, f"`{key}` is {value!r}; a positive number is needed")


def _values(hparams: Mapping[str, Any], key: str, path: str, *, per_layer: bool) -> list[Any]:
    value = hparams.get(key)
    if value is None:
        return []
    if not (per_layer and isinstance(value, list | tuple)):
        return [value]
    if len(value) != hparams["block_count"]:
        raise unfit(path, f"`{key}` has {len(value)} values for {hparams['block_count']} layers")
    return list(value)


# ---------------------------------------------------------------- tensors

_Shape = tuple[int, ...]


@attrs.frozen(kw_only=True)
class _LayerSizes:
    """Letters as in the seam: H hidden, Hq, Hkv heads, D head dim, F feed-forward, E experts."""

    hidden: int
    q_rows: int
    k_rows: int
    v_rows: int
    o_columns: int
    head_dim: int
    feed_forward: int
    experts: int
    expert_feed_forward: int


def _layer_sizes(hparams: Mapping[str, Any], layer: int, path: str) -> _LayerSizes:
    def of(key: str, default: Any = None) -> Any:
        value = hparams.get(key, default)
        if value is None:
            raise unfit(path, f"hyper-parameter `{key}` is missing")
        return value[layer] if isinstance(value, list | tuple) else value

    hidden, heads = of("embedding_length"), of("attention.head_count")
    kv_heads = of("attention.head_count_kv", heads)
    key_length = of("attention.key_length", hidden // heads)
    value_length = of("attention.value_length", key_length)
    if heads % kv_heads or key_length % 2 or of("rope.dimension_count", 2) > key_length:
        raise unfit(
            path, f"{heads} query heads, {kv_heads} KV heads, head dim {key_length} do not combine"
        )
    experts = of("expert_count", 0)
    if experts and not 1 <= of("expert_used_count", 0) <= experts:
        raise unfit(path, f"`expert_used_count` must lie in 1 … {experts}")
    return _LayerSizes(
        hidden=hidden,
        q_rows=heads * key_length,
        k_rows=kv_heads * key_length,
        v_rows=kv_heads * value_length,
        o_columns=heads * value_length,
        head_dim=key_length,
        feed_forward=0 if experts else of("feed_forward_length"),
        experts=experts,
        expert_feed_forward=of("expert_feed_forward_length", of("feed_forward_length", 0)),
    )


def _layer_tensors(arch: Architecture, s: _LayerSizes) -> Iterator[tuple[str, _Shape, bool]]:
    """(name without `blk.N.`, shape, required) of one layer."""
    yield "attn_norm.weight", (s.hidden,), True
    yield "attn_q.weight", (s.q_rows, s.hidden), True
    yield "attn_k.weight", (s.k_rows, s.hidden), True
    yield "attn_v.weight", (s.v_rows, s.hidden), True
    yield "attn_output.weight", (s.hidden, s.o_columns), True
    yield "ffn_norm.weight", (s.hidden,), True
    if arch.qkv_bias or arch.optional_biases:
        yield "attn_q.bias", (s.q_rows,), arch.qkv_bias
        yield "attn_k.bias", (s.k_rows,), arch.qkv_bias
        yield "attn_v.bias", (s.v_rows,), arch.qkv_bias
        yield "attn_output.bias", (s.hidden,), False
    if arch.qk_norm:
        yield "attn_q_norm.weight", (s.head_dim,), True
        yield "attn_k_norm.weight", (s.head_dim,), True
    if arch.post_norms:
        yield "post_attention_norm.weight", (s.hidden,), True
        yield "post_ffw_norm.weight", (s.hidden,), True
    yield from _mlp_tensors(s)


def _mlp_tensors(s: _LayerSizes) -> Iterator[tuple[str, _Shape, bool]]:
    if s.experts:
        up = (s.experts, s.expert_feed_forward, s.hidden)
        yield "ffn_gate_inp.weight", (s.experts, s.hidden), True
        yield "ffn_gate_exps.weight", up, True
        yield "ffn_up_exps.weight", up, True
        yield "ffn_down_exps.weight", (up[0], up[2], up[1]), True
    else:
        yield "ffn_gate.weight", (s.feed_forward, s.hidden), True
        yield "ffn_up.weight", (s.feed_forward, s.hidden), True
        yield "ffn_down.weight", (s.hidden, s.feed_forward), True


def _tensors(
    arch: Architecture, hparams: Mapping[str, Any], path: str
) -> Iterator[tuple[str, _Shape, bool]]:
    embedding = (hparams["vocab_size"], hparams["embedding_length"])
    yield "token_embd.weight", embedding, True
    yield "output_norm.weight", embedding[1:], True
    yield "output.weight", embedding, False
    for layer in range(hparams["block_count"]):
        sizes = _layer_sizes(hparams, layer, path)
        if layer == 0:
            rotated = hparams.get("rope.dimension_count", sizes.head_dim)
            yield "rope_freqs.weight", (rotated // 2,), False
        for name, shape, required in _layer_tensors(arch, sizes):
            yield f"blk.{layer}.{name}", shape, required


def check_model(checkpoint: Checkpoint) -> None:
    """Raise `ModelError` unless the checkpoint is a whole model, as far as its kind is known."""
    path = checkpoint.path
    arch = ARCHITECTURES.get(checkpoint.architecture)
    if arch is None:
        return
    _check_hparams(checkpoint.hparams, path)
    unknown = set(checkpoint.names())
    for name, shape, required in _tensors(arch, checkpoint.hparams, path):
        if name in unknown:
            _check_shape(checkpoint, name, shape)
            unknown.discard(name)
        elif required:
            raise unfit(path, f"tensor `{name}` is missing")
    if unknown:
        raise unfit(path, f"{len(unknown)} tensors are unknown, e.g. `{min(unknown)}`")


def _check_shape(checkpoint: Checkpoint, name: str, shape: _Shape) -> None:
    # unpacking a quantised matrix to learn its shape would read the whole model when it is opened
    shape_of = getattr(checkpoint, "shape", None)
    found = checkpoint.tensor(name).shape if shape_of is None else shape_of(name)
    if found != shape:
        raise unfit(
            checkpoint.path, f"tensor `{name}` has shape {list(found)}, {list(shape)} is due"
        )
