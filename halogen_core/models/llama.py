"""Llama, and what is shaped like it: Mistral, Mixtral, SmolLM2."""

from halogen_core.models.dense import dense_config as config

__all__ = ["config"]
