"""Qwen 2 and 2.5: the plain decoder with biases on Q, K and V."""

from __future__ import annotations

from halogen_core.models.hparams import attention_specs, decoder_config
from halogen_core.spi import Checkpoint, DecoderConfig


def config(checkpoint: Checkpoint) -> DecoderConfig:
    return decoder_config(checkpoint, attention_specs(checkpoint))
