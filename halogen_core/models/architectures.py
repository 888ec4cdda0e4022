"""Architectures by GGUF's name: the built-in ones and those of plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import cast

from halogen_core.errors import ModelError
from halogen_core.spi import Checkpoint, DecoderConfig, FormatSpec

ARCHITECTURES = tuple(
    FormatSpec(name=name, factory=f"halogen_core.models.{name}:config")
    for name in ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3")
)


def config_of(checkpoint: Checkpoint, more: Iterable[FormatSpec] = ()) -> DecoderConfig:
    """The checkpoint's decoder; `more` are the records of `halogen_model_architectures`.

    A factory `"pkg.mod:config"` is called with the checkpoint. Raises `ModelError`.
    """
    known = {spec.name: spec for spec in (*ARCHITECTURES, *more)}
    spec = known.get(checkpoint.architecture)
    if spec is None:
        raise ModelError(
            f"architecture of `{checkpoint.path}` is `{checkpoint.architecture}`; known are "
            f"{', '.join(sorted(known))}",
            code="HRT-2401",
            fix="choose another model, or install a plugin that brings this architecture",
        )
    module, _, attribute = spec.factory.partition(":")
    factory = getattr(import_module(module), attribute)
    return cast("Callable[[Checkpoint], DecoderConfig]", factory)(checkpoint)
