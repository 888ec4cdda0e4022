"""Architectures by name; plugins add theirs as `FormatSpec` records."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from halogen_core.errors import ModelError
from halogen_core.spi import Checkpoint, DecoderConfig, FormatSpec

ARCHITECTURES: tuple[FormatSpec, ...] = tuple(
    FormatSpec(name=name, factory=f"halogen_core.models.{name}:config")
    for name in ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3")
)


def config_of(checkpoint: Checkpoint, more: Iterable[FormatSpec] = ()) -> DecoderConfig:
    """The decoder's shape; raises `ModelError` (HRT-2404) for an unknown architecture."""
    known = {spec.name: spec for spec in (*ARCHITECTURES, *more)}
    spec = known.get(checkpoint.architecture)
    if spec is None:
        raise ModelError(
            f"`{checkpoint.path}` has the architecture `{checkpoint.architecture}`;"
            f" known are {', '.join(known)}",
            code="HRT-2404",
            fix="use a model of a known architecture, or install a plugin that adds it",
        )
    module, _, attribute = spec.factory.partition(":")
    config: DecoderConfig = getattr(importlib.import_module(module), attribute)(checkpoint)
    return config
