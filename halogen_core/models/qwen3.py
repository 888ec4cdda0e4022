"""Qwen 3: RMSNorm of each Q and K head before rotation, head dim given apart from hidden size."""

from __future__ import annotations

from halogen_core.models.hparams import attention_specs, decoder_config
from halogen_core.spi import Checkpoint, DecoderConfig


def config(checkpoint: Checkpoint) -> DecoderConfig:
    return decoder_config(checkpoint, attention_specs(checkpoint))
