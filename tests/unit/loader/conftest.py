"""Fixtures of the loader's tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def tiny_gguf(tmp_path):
    from tiny_files import write_llama

    return write_llama(tmp_path / "tiny.gguf")


@pytest.fixture
def tiny_hf(tmp_path):
    from tiny_files import write_hf

    return write_hf(tmp_path / "tiny-hf")


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    """The tokenizer of SmolLM2: byte-level BPE."""
    from halogen_core.loader import load_tokenizer, open_model

    return load_tokenizer(open_model(smollm2_path))


@pytest.fixture(scope="session")
def gemma3(gemma3_path):
    """The tokenizer of Gemma 3: SentencePiece."""
    from halogen_core.loader import load_tokenizer, open_model

    return load_tokenizer(open_model(gemma3_path))
