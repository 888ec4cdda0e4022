"""What the architectures share: a pre-norm decoder read from generic hyper-parameters."""

from __future__ import annotations

import attrs

from halogen_core.errors import ModelError
from halogen_core.models.hparams import HParams
from halogen_core.models.rope import rope_spec
from halogen_core.spi import (
    AttentionSpec,
    Checkpoint,
    DecoderConfig,
    KVSpec,
    LayerConfig,
    MoESpec,
    RopeSpec,
)


def dense_config(checkpoint: Checkpoint) -> DecoderConfig:
    """A Llama-like decoder; biases, sinks, Q/K norms and tying are told by which tensors exist.

    Architectures start from this and `attrs.evolve` what differs.
    """
    hparams = HParams(checkpoint)
    layers = hparams.integer("block_count")
    hidden = hparams.integer("embedding_length")
    layer = LayerConfig(
        attention=attention_spec(hparams, rope=None),
        moe=moe_spec(hparams),
        sinks=hparams.has_tensor("blk.0.attn_sinks.weight"),
    )
    rope = rope_spec(hparams, layer.attention.head_dim)
    layer = attrs.evolve(layer, attention=attrs.evolve(layer.attention, rope=rope))
    full = attrs.evolve(layer, attention=attrs.evolve(layer.attention, window=None))
    return DecoderConfig(
        architecture=checkpoint.architecture,
        layers=tuple(
            layer if windowed else full for windowed in windowed_layers(hparams, layers, period=0)
        ),
        hidden_size=hidden,
        intermediate_size=_intermediate(hparams, layer),
        vocab_size=_vocab_size(hparams, hidden),
        context_length=hparams.integer("context_length"),
        norm_eps=hparams.number("attention.layer_norm_rms_epsilon"),
        qkv_bias=hparams.has_tensor("blk.0.attn_q.bias"),
        output_bias=hparams.has_tensor("blk.0.attn_output.bias"),
        qk_norm=hparams.has_tensor("blk.0.attn_q_norm.weight"),
        tied_embeddings=not hparams.has_tensor("output.weight"),
        logit_scale=hparams.number("logit_scale", 1.0),
        final_softcap=hparams.optional_number("final_logit_softcapping"),
    )


def attention_spec(hparams: HParams, *, rope: RopeSpec | None) -> AttentionSpec:
    """Heads, dims, scale, window and softcap as the file has them."""
    heads = hparams.integer("attention.head_count")
    kv_heads = hparams.integer("attention.head_count_kv", heads)
    head_dim = hparams.integer(
        "attention.key_length", hparams.integer("embedding_length") // max(heads, 1)
    )
    value_dim = hparams.integer("attention.value_length", head_dim)
    if heads < 1 or kv_heads < 1 or heads % kv_heads or value_dim != head_dim:
        raise ModelError(
            f"`attention.head_count` is {heads}, `attention.head_count_kv` {kv_heads}, "
            f"`attention.key_length` {head_dim}, `attention.value_length` {value_dim}; query heads "
            "must be a multiple of kv heads and the lengths equal",
            code="HRT-2403",
            fix="choose another model",
        )
    window = hparams.integer("attention.sliding_window", 0)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=hparams.number("attention.scale", 0.0) or head_dim**-0.5,
        rope=rope,
        window=window or None,
        softcap=hparams.optional_number("attn_logit_softcapping"),
        norm_eps=hparams.number("attention.layer_norm_rms_epsilon"),
    )


def windowed_layers(hparams: HParams, layers: int, *, period: int) -> list[bool]:
    """Which layers have the window: as the file lists them, or all but every `period`-th."""
    key = "attention.sliding_window_pattern"
    pattern = hparams.per_layer(key, layers)
    if pattern is not None:
        return [bool(entry) for entry in pattern]
    period = hparams.integer(key, period)
    return [period == 0 or (layer + 1) % period != 0 for layer in range(layers)]


def moe_spec(hparams: HParams) -> MoESpec | None:
    """Routing, where the file has experts."""
    experts = hparams.integer("expert_count", 0)
    if not experts:
        return None
    gating = {0: "softmax", 1: "softmax", 2: "sigmoid"}
    kind = hparams.integer("expert_gating_func", 0)
    if kind not in gating:
        raise ModelError(
            f"`expert_gating_func` is {kind}; supported are 1 (softmax) and 2 (sigmoid)",
            code="HRT-2403",
            fix="choose another model",
        )
    return MoESpec(
        num_experts=experts,
        top_k=hparams.integer("expert_used_count"),
        gating=gating[kind],
        normalize_top_k=hparams.flag("expert_weights_norm", default=True),
        weight_scale=hparams.number("expert_weights_scale", 0.0) or 1.0,
    )


def kv_spec(config: DecoderConfig, *, dtype: str, block_size: int) -> KVSpec:
    """What a decoder wants cached."""
    attention = config.layers[0].attention
    return KVSpec(
        num_layers=config.num_layers,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        dtype=dtype,
        block_size=block_size,
    )


def _intermediate(hparams: HParams, layer: LayerConfig) -> int:
    dense = "feed_forward_length"
    if layer.moe is None:
        return hparams.integer(dense)
    key = "expert_feed_forward_length"
    return hparams.integer(key if key in hparams.checkpoint.hparams else dense)


def _vocab_size(hparams: HParams, hidden: int) -> int:
    """The table's rows; a `vocab_size` key must agree when it is compared with the shape."""
    if not hparams.has_tensor("token_embd.weight"):
        hparams.tensor("token_embd.weight", (hparams.integer("vocab_size", 0), hidden))
    return hparams.checkpoint.tensor("token_embd.weight").shape[0]
