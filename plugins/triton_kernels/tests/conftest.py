"""Kernels run in Triton's interpreter here; the variable must stand before they are imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
