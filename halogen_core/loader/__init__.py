"""Model files: formats, tokenizers, chat templates, and where models come from."""

from __future__ import annotations

from halogen_core.loader.opening import open_model

__all__ = ["open_model"]
