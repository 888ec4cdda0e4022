"""Open whatever holds a model; the content decides, not the file's name."""

from __future__ import annotations

from pathlib import Path

from halogen_core.loader.architecture import check_model
from halogen_core.loader.failures import foreign, missing
from halogen_core.loader.gguf_checkpoint import GGUFCheckpoint, open_gguf
from halogen_core.loader.gguf_tokenizer import gguf_tokenizer
from halogen_core.loader.hf_checkpoint import HFCheckpoint, open_directory
from halogen_core.loader.hf_files import refuse_pickle
from halogen_core.loader.hf_tokenizer import hf_tokenizer
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
    return read_tokenizer(checkpoint).prepare()


def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The vocabulary of an opened model; the rest is left to `Tokenizer.prepare`."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return gguf_tokenizer(checkpoint.metadata, checkpoint.path)
    return hf_tokenizer(Path(checkpoint.path))


def _open(path: Path) -> GGUFCheckpoint | HFCheckpoint:
    if not path.exists():
        raise missing(path, "no such file or directory")
    if path.is_dir():
        return _open_directory(path)
    if not path.is_file():
        raise missing(path, "it is neither a file nor a directory")
    start = _first_bytes(path)
    if start.startswith((b"PK\x03\x04", b"\x80")):
        raise refuse_pickle(path)
    if start[8:9] == b"{" and (path.parent / "config.json").is_file():
        return open_directory(path.parent)
    return open_gguf(path)


def _open_directory(path: Path) -> GGUFCheckpoint | HFCheckpoint:
    if (path / "config.json").is_file():
        return open_directory(path)
    files = sorted(path.glob("*.gguf"))
    firsts = [f for f in files if "-of-" not in f.name or "-00001-of-" in f.name]
    if len(firsts) == 1:
        return open_gguf(firsts[0])
    if firsts:
        names = ", ".join(f.name for f in firsts)
        raise foreign(path, f"it holds several models ({names}); name one")
    raise foreign(path, "it has neither config.json nor a .gguf file")


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(9)
    except OSError as exc:
        raise missing(path, exc.strerror or str(exc)) from exc
