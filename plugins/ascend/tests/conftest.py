"""Fixtures of the simulated NPU, and float64 oracles written apart from it."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def backend():
    from ascend_steps import open_sim

    made = open_sim()
    yield made
    made.close()
