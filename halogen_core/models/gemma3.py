"""Gemma 3: five sliding-window layers to one global, norms around both halves, scaled embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halogen_core.models.hparams import attention_specs, decoder_config, head_dim, required
from halogen_core.models.rope import plain_rope_spec, rope_spec
from halogen_core.spi import Activation, Checkpoint, DecoderConfig

_PERIOD = 6
_LAYERS_27B = 62


def config(checkpoint: Checkpoint) -> DecoderConfig:
    h, size = checkpoint.hparams, head_dim(checkpoint)
    hidden, layers = required(checkpoint, "embedding_length"), required(checkpoint, "block_count")
    local = _is_local(checkpoint, layers)
    window = int(h.get("attention.sliding_window") or 0) or None
    everywhere = rope_spec(checkpoint, size)
    nearby = plain_rope_spec(
        float(h.get("rope.freq_base_swa", 10000.0)), everywhere.dim, checkpoint.rope_style
    )
    heads = h["attention.head_count"]
    scale = (hidden / heads) ** -0.5 if layers == _LAYERS_27B else size**-0.5
    attention = attention_specs(
        checkpoint,
        scale=scale,
        windows=[window if is_local else None for is_local in local],
        rope_of=lambda i: nearby if local[i] else everywhere,
    )
    return decoder_config(
        checkpoint, attention, activation=Activation.GELU_TANH, embed_scale=math.sqrt(hidden)
    )


def _is_local(checkpoint: Checkpoint, layers: int) -> Sequence[bool]:
    """Which layers slide: told one by one, by a period, or every sixth is global."""
    pattern = checkpoint.hparams.get("attention.sliding_window_pattern", _PERIOD)
    if isinstance(pattern, list | tuple):
        return [bool(p) for p in pattern]
    return [(i + 1) % int(pattern) != 0 for i in range(layers)]
