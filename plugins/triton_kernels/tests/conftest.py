"""Kernels run in Triton's interpreter here, unless HALOGEN_TEST_DEVICE names a GPU (`cuda`).

The variable that asks for the interpreter must stand before the kernels are imported.
"""

import os

DEVICE = os.environ.get("HALOGEN_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
