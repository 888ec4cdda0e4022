"""The real models, fetched once per user as `halogen pull` does it, and llama.cpp to compare with."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import httpx
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


@pytest.fixture(scope="session")
def llama_cpp() -> Iterator[Callable[[Path], httpx.Client]]:
    """llama.cpp serving a file, one server process per file; one thread, float32 KV."""
    with ExitStack() as running:

        @cache
        def serving(path: Path) -> httpx.Client:
            command = [
                sys.executable,
                str(Path(__file__).with_name("llama_cpp_server.py")),
                str(path),
            ]
            server = running.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            running.callback(server.kill)
            address = server.stdout.readline().strip()
            return running.enter_context(httpx.Client(base_url=address, timeout=120))

        yield serving
