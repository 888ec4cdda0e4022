"""Model files: formats, tokenizers, chat templates, and where models come from."""

from __future__ import annotations

from halogen_core.loader.opening import load_tokenizer, open_model, read_tokenizer
from halogen_core.loader.tokenizer import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer", "open_model", "read_tokenizer"]
