"""The real models, fetched once per user as `halogen pull` does it."""

import os
from pathlib import Path

import pytest

from halogen_core.cli.pull import pull_model


def _models_dir() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "halogen" / "test-models"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, a GGUF file with a chat template."""
    return pull_model("smollm2-135m", _models_dir())


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M (mostly Q5_0 inside), a base model."""
    return pull_model("gemma3-270m", _models_dir())
