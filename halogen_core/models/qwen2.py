"""Qwen 2 and 2.5: Llama with biases on Q, K and V."""

from __future__ import annotations

import attrs

from halogen_core.models.dense import dense_config
from halogen_core.spi import Checkpoint, DecoderConfig


def config(checkpoint: Checkpoint) -> DecoderConfig:
    """The file must have the biases."""
    return attrs.evolve(dense_config(checkpoint), qkv_bias=True)
