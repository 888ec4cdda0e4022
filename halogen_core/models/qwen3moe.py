"""Qwen 3 mixture of experts: Qwen 3 with top-k softmax routing, renormalised."""

from __future__ import annotations

from halogen_core.models import qwen3
from halogen_core.models.hparams import HParams
from halogen_core.spi import Checkpoint, DecoderConfig


def config(checkpoint: Checkpoint) -> DecoderConfig:
    """The file must have experts."""
    HParams(checkpoint).integer("expert_count")
    return qwen3.config(checkpoint)
