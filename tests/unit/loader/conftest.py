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
