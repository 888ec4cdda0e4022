"""What a model's weights take at least, before any of them is read."""

from __future__ import annotations

from halogen_core.loader.gguf_checkpoint import GGUFCheckpoint
from halogen_core.loader.hf_checkpoint import HFCheckpoint
from halogen_core.spi import Checkpoint, DecoderConfig


def least_bytes(checkpoint: Checkpoint, config: DecoderConfig) -> int:
    """Bytes of the weights on a device, from headers alone; 0 for what a plugin's loader opened.

    Packing may make them larger, never smaller; F32 counts half: devices keep it in 16 bits.
    """
    return sum(_least(checkpoint, name) for name in used_names(checkpoint, config))


def used_names(checkpoint: Checkpoint, config: DecoderConfig) -> list[str]:
    """The tensors that the decoder loads."""
    layers = tuple(f"blk.{index}." for index in range(config.num_layers))
    # heads that draft and towers that see have layers and names beyond these
    return [n for n in checkpoint.names() if n.startswith(layers) or not n.startswith("blk.")]


def _least(checkpoint: Checkpoint, name: str) -> int:
    if isinstance(checkpoint, GGUFCheckpoint | HFCheckpoint):
        return sum(size // 2 if kind == "F32" else size for kind, size in checkpoint.stored(name))
    return 0
