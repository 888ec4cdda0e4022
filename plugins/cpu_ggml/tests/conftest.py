"""Each instruction set of this machine, and ggml's own ops, as fixtures."""

import sys
from pathlib import Path

import pytest

from halogen_core.cli.pull import pull_model

sys.path.insert(0, str(Path(__file__).parent))

from emulation import cache_directory
from ggml_cases import ISAS, MODES, backend_for, opened


@pytest.fixture(scope="session", autouse=True)
def _close_backends():
    yield
    for backend in opened.values():
        backend.close()


@pytest.fixture(params=MODES)
def backend(request):
    """Each instruction set's kernels, and ggml's own ops."""
    return backend_for(request.param)


@pytest.fixture(params=ISAS)
def kernel_backend(request):
    return backend_for(request.param)


@pytest.fixture(scope="session")
def smollm2_path():
    return pull_model("smollm2-135m", cache_directory("test-models"))


@pytest.fixture(scope="session")
def gemma3_path():
    return pull_model("gemma3-270m", cache_directory("test-models"))
