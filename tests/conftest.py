"""The real models, fetched once per user as `halogen pull` does it, and llama.cpp to compare with."""

import os
from collections.abc import Callable
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
def llama_cpp() -> Callable[[Path], httpx.Client]:
    """llama.cpp (the prebuilt `xllamacpp`) serving a file, one server per file; one thread, float32 KV."""
    import xllamacpp

    servers = []

    @cache
    def serving(path: Path) -> httpx.Client:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel = 1024, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.warmup, params.verbosity = False, -1
        servers.append(xllamacpp.Server(params))
        return httpx.Client(base_url=servers[-1].listening_address, timeout=120)

    return serving
