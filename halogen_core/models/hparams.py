"""The part of a `DecoderConfig` that all architectures read alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from halogen_core.errors import ModelError
from halogen_core.models.rope import rope_spec
from halogen_core.spi import (
    Activation,
    AttentionSpec,
    Checkpoint,
    DecoderConfig,
    LayerConfig,
    MoESpec,
    RopeSpec,
)


def required(checkpoint: Checkpoint, key: str) -> Any:
    """A hyper-parameter, or `ModelError` (HRT-2403) naming it."""
    try:
        return checkpoint.hparams[key]
    except KeyError:
        raise ModelError(
            f"`{checkpoint.path}` lacks the hyper-parameter `{key}`",
            code="HRT-2403",
            fix="convert the model again with a current converter",
        ) from None


def per_layer(value: Any, num_layers: int) -> Sequence[Any]:
    """A hyper-parameter that may be one value or one per layer."""
    return value if isinstance(value, list | tuple) else [value] * num_layers


def head_dim(checkpoint: Checkpoint) -> int:
    """D: given, or hidden size over heads."""
    h = checkpoint.hparams
    if "attention.key_length" in h:
        return int(h["attention.key_length"])
    num_layers = int(required(checkpoint, "block_count"))
    heads = per_layer(required(checkpoint, "attention.head_count"), num_layers)
    return int(required(checkpoint, "embedding_length")) // int(heads[0])


def attention_specs(
    checkpoint: Checkpoint,
    *,
    scale: float | None = None,
    windows: Sequence[int | None] | None = None,
    rope_of: Callable[[int], RopeSpec] | None = None,
) -> list[AttentionSpec]:
    """One `AttentionSpec` a layer; `windows` and `rope_of` where layers differ."""
    h = checkpoint.hparams
    layers, size = int(required(checkpoint, "block_count")), head_dim(checkpoint)
    heads = per_layer(required(checkpoint, "attention.head_count"), layers)
    kv_heads = per_layer(h.get("attention.head_count_kv", heads), layers)
    shared = rope_spec(checkpoint, size)
    return [
        AttentionSpec(
            num_heads=int(heads[i]),
            num_kv_heads=int(kv_heads[i]),
            head_dim=size,
            scale=float(h.get("attention.scale") or scale or size**-0.5),
            rope=rope_of(i) if rope_of else shared,
            window=windows[i] if windows else None,
            softcap=h.get("attn_logit_softcapping"),
            norm_eps=float(required(checkpoint, "attention.layer_norm_rms_epsilon")),
        )
        for i in range(layers)
    ]


def decoder_config(
    checkpoint: Checkpoint,
    attention: Sequence[AttentionSpec],
    *,
    moe: MoESpec | None = None,
    activation: Activation = Activation.SILU,
    embed_scale: float = 1.0,
) -> DecoderConfig:
    """The config over `attention`; biases, norms and tying are what the tensors say."""
    h, names = checkpoint.hparams, checkpoint.names()
    width = "expert_feed_forward_length" if moe else "feed_forward_length"
    sizes = per_layer(required(checkpoint, width), len(attention))
    return DecoderConfig(
        architecture=checkpoint.architecture,
        layers=tuple(
            LayerConfig(
                attention=spec,
                moe=moe if f"blk.{i}.ffn_gate_inp.weight" in names else None,
                sinks=f"blk.{i}.attn_sinks.weight" in names,
            )
            for i, spec in enumerate(attention)
        ),
        hidden_size=int(required(checkpoint, "embedding_length")),
        intermediate_size=int(sizes[0]),
        vocab_size=int(required(checkpoint, "vocab_size")),
        context_length=int(required(checkpoint, "context_length")),
        norm_eps=float(required(checkpoint, "attention.layer_norm_rms_epsilon")),
        activation=activation,
        qkv_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        post_norms="blk.0.post_ffw_norm.weight" in names,
        tied_embeddings="output.weight" not in names,
        embed_scale=embed_scale,
        logit_scale=float(h.get("logit_scale") or 1.0),
        final_softcap=h.get("final_logit_softcapping"),
    )
