"""Model files: formats, tokenizers, chat templates, and where models come from."""
