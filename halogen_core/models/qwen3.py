"""Qwen 3: an RMSNorm on every Q and K head."""

from __future__ import annotations

import attrs

from halogen_core.models.dense import dense_config
from halogen_core.spi import Checkpoint, DecoderConfig


def config(checkpoint: Checkpoint) -> DecoderConfig:
    """The file must have the Q and K norms."""
    return attrs.evolve(dense_config(checkpoint), qk_norm=True)
