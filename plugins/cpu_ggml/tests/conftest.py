"""Each instruction set of this machine, and ggml's own ops, as fixtures."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

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
