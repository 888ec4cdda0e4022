"""The two checks of KV blocks that every backend makes, and that every backend makes them."""

import importlib

import attrs
import numpy as np
import pytest

from halogen_core.errors import ConfigError
from halogen_core.spi import (
    BackendOptions,
    KVBlocks,
    KVSpec,
    check_block_ids,
    check_kv_blocks,
    kv_block_shape,
)

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=64, dtype="f16", block_size=128)


def blocks(spec, n):
    return KVBlocks(spec=spec, data=np.zeros(kv_block_shape(spec, n), np.uint8))


def test_what_fits_passes():
    check_kv_blocks(SPEC, [4, 0], blocks(SPEC, 2))
    check_block_ids([4, 0], 5)


@pytest.mark.parametrize(
    "data",
    [
        blocks(SPEC, 3),
        blocks(attrs.evolve(SPEC, num_layers=1), 2),
        # as many bytes, another meaning
        blocks(attrs.evolve(SPEC, dtype="bf16"), 2),
        blocks(attrs.evolve(SPEC, num_kv_heads=1, head_dim=128), 2),
    ],
)
def test_blocks_of_another_kind_are_refused(data):
    with pytest.raises(ConfigError, match="this pool takes") as caught:
        check_kv_blocks(SPEC, [4, 0], data)
    assert caught.value.code == "HRT-3103"


@pytest.mark.parametrize("block", [-1, 5])
def test_blocks_that_are_not_there_are_refused(block):
    with pytest.raises(ConfigError, match="blocks 0 to 4") as caught:
        check_block_ids([0, block], 5)
    assert caught.value.code == "HRT-3104"


@pytest.mark.parametrize(
    ("package", "device"),
    [("halogen_cpu_reference", None), ("halogen_cpu_ggml", None), ("halogen_ascend", "ascend:sim")],
)
def test_every_backend_asks_the_same(package, device):
    module = importlib.import_module(f"{package}.backend")
    backend = module.create(BackendOptions(device=device, threads=1))
    spec = attrs.evolve(SPEC, block_size=backend.capabilities().kv_block_sizes[0])
    kv = backend.kv_alloc(backend.kv_layout(spec), 3)
    backend.kv_import(kv, [2, 0], blocks(spec, 2))
    with pytest.raises(ConfigError, match="this pool takes") as caught:
        backend.kv_import(kv, [2, 0], blocks(spec, 1))
    assert caught.value.code == "HRT-3103"
    backend.close()
