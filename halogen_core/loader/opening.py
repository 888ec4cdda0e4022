"""Open whatever holds a model; the content decides, not the file's name."""

from __future__ import annotations

from pathlib import Path

from halogen_core.errors import ModelError
from halogen_core.loader.architecture import check_model
from halogen_core.loader.failures import missing
from halogen_core.loader.gguf_checkpoint import GGUFCheckpoint, open_gguf
from halogen_core.loader.gguf_tokenizer import gguf_tokenizer
from halogen_core.loader.tokenizer import Tokenizer
from halogen_core.spi.model import Checkpoint


def open_model(path: str | Path) -> Checkpoint:
    """Open a GGUF file (or its first shard), or a directory with one or with safetensors.

    Nothing is read but headers. Raises `ModelError` for what is missing, damaged or unknown.
    """
    path = Path(path)
    checkpoint = _open(path)
    check_model(checkpoint)
    return checkpoint


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of an opened model; raises `ModelError`."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return gguf_tokenizer(checkpoint.metadata, checkpoint.path)
    raise ModelError(f"`{checkpoint.path}` has no tokenizer")


def _open(path: Path) -> GGUFCheckpoint:
    if not path.exists():
        raise missing(path, "no such file or directory")
    return open_gguf(path)
