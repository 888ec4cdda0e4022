"""Gemma 3: local and global layers, norms on both sides, scaled embeddings.

GGUF stores norm weights as w + 1, so that they are plain RMSNorm weights.
"""

from __future__ import annotations

import attrs

from halogen_core.models.dense import dense_config, windowed_layers
from halogen_core.models.hparams import HParams
from halogen_core.models.rope import rope_spec
from halogen_core.spi import Activation, Checkpoint, DecoderConfig, LayerConfig

_PERIOD = 6
"""Every sixth layer is global."""


def config(checkpoint: Checkpoint) -> DecoderConfig:
    """Local layers rotate with base 10,000 and no scaling, global ones as the file says."""
    hparams, dense = HParams(checkpoint), dense_config(checkpoint)
    window = hparams.integer("attention.sliding_window")
    attention = attrs.evolve(dense.layers[0].attention, window=window, scale=_scale(hparams, dense))
    base = hparams.number("rope.freq_base_swa", 10000.0)
    rope = rope_spec(hparams, attention.head_dim, base=base, scaled=False)
    local = LayerConfig(attention=attrs.evolve(attention, rope=rope))
    globally = LayerConfig(attention=attrs.evolve(attention, window=None))
    return attrs.evolve(
        dense,
        layers=tuple(
            local if windowed else globally
            for windowed in windowed_layers(hparams, dense.num_layers, period=_PERIOD)
        ),
        activation=Activation.GELU_TANH,
        qk_norm=True,
        post_norms=True,
        embed_scale=dense.hidden_size**0.5,
    )


def _scale(hparams: HParams, dense: DecoderConfig) -> float:
    attention = dense.layers[0].attention
    if "attention.scale" in hparams.checkpoint.hparams:
        return attention.scale
    # only the 27B, told by its 62 layers, scales by the hidden size per head
    by_hidden = dense.num_layers == 62
    width = dense.hidden_size // attention.num_heads if by_hidden else attention.head_dim
    return float(width**-0.5)
