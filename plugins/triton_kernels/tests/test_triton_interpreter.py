"""The interpreter's repairs: bfloat16 is rounded as hardware rounds it."""

import os

import numpy as np
import torch
import triton
import triton.language as tl

from halogen_triton.interpreter import repair, rounded

repair()
DEVICE = os.environ.get("HALOGEN_TEST_DEVICE", "cpu")


@triton.jit
def narrow(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(tl.bfloat16))


def test_float32_is_rounded_to_the_nearest_bfloat16():
    values = torch.randn(256, generator=torch.Generator().manual_seed(0))
    # ties, infinities, zeros, subnormals, the largest finite value
    values[:8] = torch.tensor(
        [1.00390625, 1.01171875, float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3.4e38]
    )
    found = torch.empty(256, dtype=torch.bfloat16)
    found, values = found.to(DEVICE), values.to(DEVICE)
    narrow[(1,)](values, found, N=256)
    assert torch.equal(found, values.bfloat16())


def test_nan_stays_nan():
    bits = rounded(np.array([np.nan, -np.nan], np.float32))
    assert torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).isnan().all()


def test_integers_become_bfloat16_by_value():
    codes = torch.arange(-128, 128, dtype=torch.int8).to(DEVICE)
    found = torch.empty(256, dtype=torch.bfloat16, device=DEVICE)
    narrow[(1,)](codes, found, N=256)
    assert torch.equal(found, codes.bfloat16())
