"""Repacking against ggml's own dequantisation, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from halogen_core.spi import FORMATS
from halogen_triton.planes import PLANE_FORMATS, concatenate, dequantise, repack

K = 512
GGUF_FORMATS = [name for name in PLANE_FORMATS if name in FORMATS]


def random_blocks(name, *lead, k=K, seed=0):
    """Random bytes with sane f16 scales, as GGUF holds them: [..., bytes]."""
    rng = np.random.default_rng(seed)
    fmt = FORMATS[name]
    raw = rng.integers(0, 256, (*lead, k // fmt.block, fmt.bytes), dtype=np.uint8)
    halves = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q6_K": (208,)}
    for at in halves.get(name, (0,)):
        value = rng.uniform(0.5, 1.5, (*lead, k // fmt.block)).astype(np.float16) / 64
        raw[..., at : at + 2] = value[..., None].view(np.uint8)
    return raw.reshape(*lead, -1)


def reference(name, raw):
    kind = gguf.GGMLQuantizationType(FORMATS[name].ggml_type)
    return torch.from_numpy(gguf.dequantize(raw, kind).astype(np.float32))


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_dequantise_is_bit_exact(name):
    raw = random_blocks(name, 5)
    planes = repack(name, torch.from_numpy(raw), (5, K))
    assert torch.equal(dequantise(planes), reference(name, raw))


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_experts_and_stacking(name):
    raw = random_blocks(name, 3, 4)
    planes = repack(name, torch.from_numpy(raw), (3, 4, K))
    want = reference(name, raw.reshape(12, -1)).reshape(3, 4, K)
    assert torch.equal(dequantise(planes), want)
    both = concatenate([planes, planes])
    assert both.shape == (3, 8, K)
    assert torch.equal(dequantise(both), torch.cat([want, want], 1))


def test_packed_size_stays_near_the_file():
    for name in GGUF_FORMATS:
        planes = repack(name, torch.from_numpy(random_blocks(name, 4)), (4, K))
        assert planes.nbytes <= 1.03 * FORMATS[name].nbytes(4 * K)
