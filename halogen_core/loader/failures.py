"""The loader's errors: every one names the file, the reason and what to do."""

from __future__ import annotations

from pathlib import Path

from halogen_core.errors import ModelError


def missing(path: Path | str, reason: str) -> ModelError:
    """There is nothing readable at `path`."""
    return ModelError(
        f"cannot open model `{path}`: {reason}",
        code="HRT-2002",
        fix="check the path, or fetch a model with `halogen pull smollm2-135m`",
    )


def foreign(path: Path | str, reason: str) -> ModelError:
    """A file, but not of a format that is read."""
    return ModelError(
        f"`{path}` is not a model halogen can read: {reason}",
        code="HRT-2003",
        fix="give a .gguf file or a Hugging Face directory with config.json and *.safetensors",
    )


def damaged(path: Path | str, reason: str) -> ModelError:
    """The right format, but truncated or malformed."""
    return ModelError(
        f"model file `{path}` is damaged: {reason}",
        code="HRT-2004",
        fix="download or convert it again",
    )


def unfit(path: Path | str, reason: str) -> ModelError:
    """A well-formed file whose tensors or hyper-parameters do not make a model."""
    return ModelError(
        f"model `{path}` does not fit its architecture: {reason}",
        code="HRT-2007",
        fix="convert it again with a current converter",
    )
