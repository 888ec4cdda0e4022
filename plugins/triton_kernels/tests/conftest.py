"""Kernels run in Triton's interpreter here (see the root conftest), or on HALOGEN_TEST_DEVICE."""

import os

import pytest
import torch

DEVICE = os.environ.get("HALOGEN_TEST_DEVICE", "cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
