"""A NaN or an infinity in keys or values stays one in the cache, and reaches who sees it."""

import numpy as np
import pytest
import torch

from halogen_core.spi import AttentionSpec, KVSpec, TorchBackend
from halogen_core.spi.testing import Share, step_batch
from halogen_core.torch_backend.kv import decode, encode

KV_DTYPES = ["f32", "f16", "bf16", "q8_0", "f8_e5m2"]
HEADS, D = 2, 32
SPEC = AttentionSpec(num_heads=HEADS, num_kv_heads=HEADS, head_dim=D, scale=D**-0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_storage_keeps_them_and_nothing_else_is_spoilt(dtype, bad):
    rows = torch.from_numpy(np.random.default_rng(1).standard_normal((2, 64), dtype=np.float32))
    rows[1, 40] = bad
    got = decode(encode(rows, dtype), dtype).float()
    spoilt = torch.zeros(2, 64, dtype=torch.bool)
    spoilt[1, slice(32, 64) if dtype == "q8_0" else 40] = True  # a group has one scale
    assert torch.equal(got.isfinite(), ~spoilt)


def test_e5m2_cuts_numbers_to_its_largest():
    rows = torch.tensor([[1e30, -1e30, 60000.0, 57344.0]])
    got = decode(encode(rows, "f8_e5m2"), "f8_e5m2").float()
    assert got.tolist() == [[57344.0, -57344.0, 57344.0, 57344.0]]


@pytest.mark.parametrize("part", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_later_token_is_not_answered_from_it(dtype, part):
    backend = TorchBackend()
    kv_spec = KVSpec(num_layers=1, num_kv_heads=HEADS, head_dim=D, dtype=dtype, block_size=4)
    kv = backend.kv_alloc(backend.kv_layout(kv_spec), 4)
    rng = np.random.default_rng(2)
    for start, stop in ((0, 5), (5, 6)):
        share = Share(tokens=(0,) * (stop - start), blocks=(2, 0), start=start)
        meta = backend.upload_step(step_batch([share], 4))
        qkv = rng.standard_normal((stop - start, 3 * HEADS * D), dtype=np.float32)
        if start == 0:
            qkv[3, part * HEADS * D + 7] = np.nan
        q = backend.ops.qkv_rope_store(backend.upload(qkv), kv, 0, meta, SPEC)
        out = backend.ops.attention(q, kv, 0, meta, SPEC)
    seen = np.isnan(backend.download(out).reshape(HEADS, D)).any(-1)
    assert seen.tolist() == [True, False]
