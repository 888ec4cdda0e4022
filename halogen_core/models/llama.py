"""Llama, Mistral up to 0.3, SmolLM2 and Mixtral: the plain decoder, experts where there are any."""

from __future__ import annotations

from halogen_core.models.hparams import attention_specs, decoder_config
from halogen_core.models.qwen3moe import moe_spec
from halogen_core.spi import Checkpoint, DecoderConfig


def config(checkpoint: Checkpoint) -> DecoderConfig:
    moe = moe_spec(checkpoint) if checkpoint.hparams.get("expert_count") else None
    return decoder_config(checkpoint, attention_specs(checkpoint), moe=moe)
