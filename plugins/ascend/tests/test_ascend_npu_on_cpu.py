"""Parts of the torch_npu path that are plain torch, computed on the CPU against the oracle."""

import numpy as np
import pytest
import torch
from ascend_oracle import attend
from ascend_steps import BLOCK, step

from halogen_ascend.constraints import attention_denials, check_block_size, check_lengths
from halogen_ascend.errors import OutOfRange
from halogen_ascend.npu import kv as npu_kv
from halogen_ascend.npu.composed import composed_attention
from halogen_core.spi import (
    AttentionSpec,
    BackendOptions,
    BackendUnavailable,
    ConfigError,
    KVBlocks,
    KVSpec,
    TorchBackend,
)

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=80, dtype="f16", block_size=BLOCK)


@pytest.fixture
def cache():
    return npu_kv.allocate(npu_kv.layout_of(SPEC), 6, torch.device("cpu"))


@pytest.mark.parametrize("fields", [{}, {"window": 40}, {"softcap": 3.0}, {"sinks": True}])
def test_composed_attention_matches_float64(cache, fields):
    rng, length, count, table = np.random.default_rng(0), 150, 7, [4, 1]
    sinks = rng.standard_normal(4).astype(np.float32) if fields.pop("sinks", False) else None
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=80, scale=80**-0.5, **fields)
    k, v = (rng.standard_normal((length, 2, 80)).astype(np.float16) for _ in range(2))
    q = rng.standard_normal((count, 4, 80)).astype(np.float16)
    payload = npu_kv.npu_kv(cache)
    for position in range(length):
        block, offset = table[position // BLOCK], position % BLOCK
        payload.keys[1][block, offset] = torch.from_numpy(k[position])
        payload.values[1][block, offset] = torch.from_numpy(v[position])
    batch = step([([0] * count, length - count, table)])
    meta = TorchBackend(BackendOptions(), device="cpu").upload_step(batch)
    extra = None if sinks is None else torch.from_numpy(sinks)
    got = composed_attention(torch.from_numpy(q), payload, 1, meta, spec, extra).double().numpy()
    want = attend(
        q.astype(np.float64),
        k.astype(np.float64),
        v.astype(np.float64),
        scale=spec.scale,
        start=length - count,
        sinks=sinks,
        **fields,
    )
    assert np.abs(got - want).max() < 2e-3


def test_blocks_travel_exactly(cache):
    blank = npu_kv.export_blocks(cache, [0, 2])
    data = np.random.default_rng(1).integers(0, 256, blank.data.shape).astype(np.uint8)
    npu_kv.import_blocks(cache, [5, 3], KVBlocks(spec=SPEC, data=data))
    npu_kv.copy_blocks(cache, [(5, 1), (1, 0)])
    assert np.array_equal(npu_kv.export_blocks(cache, [5, 3]).data, data)
    assert np.array_equal(npu_kv.export_blocks(cache, [0]).data, data[:1])
    with pytest.raises(ConfigError):
        npu_kv.import_blocks(cache, [1], KVBlocks(spec=SPEC, data=data))


def test_constraints_are_numbers_not_crashes():
    for size in (0, 16, 64, 100, 640):
        with pytest.raises(ConfigError, match=f"block size {size}"):
            check_block_size(size)
    check_block_size(384)
    ok = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=1.0)
    assert attention_denials(ok) == []
    wide = AttentionSpec(num_heads=300, num_kv_heads=2, head_dim=96, scale=1.0, softcap=5.0)
    assert len(attention_denials(wide)) == 4
    check_lengths([3, 10], [3, 20], 10)
    for ends, lengths, tokens, words in (
        ([3], [3, 4], 3, "1 query ends for 2"),
        ([5, 3], [5, 5], 3, "do not ascend"),
        ([3, 9], [3, 9], 10, "to 10 tokens"),
        ([1] * 5000, [1] * 5000, 1, "takes 4096"),
    ):
        with pytest.raises(OutOfRange, match=words):
            check_lengths(ends, lengths, tokens)


def test_opening_without_the_runtime_names_what_lacks():
    from halogen_ascend.npu.backend import open_npu

    with pytest.raises(BackendUnavailable) as caught:
        open_npu(0, BackendOptions())
    assert caught.value.code == "HRT-7110"
    assert "torch_npu is not installed" in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize("block", [-1, 6])
def test_blocks_outside_the_pool_are_refused(cache, block):
    data = npu_kv.export_blocks(cache, [0])
    for act in (
        lambda: npu_kv.export_blocks(cache, [block]),
        lambda: npu_kv.import_blocks(cache, [block], data),
        lambda: npu_kv.copy_blocks(cache, [(block, 0)]),
    ):
        with pytest.raises(ConfigError) as error:
            act()
        assert error.value.code == "HRT-3104"
