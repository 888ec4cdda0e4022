"""Dense layers of one row with their edges, in the interpreter against float64."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from halogen_core.engine.batch import build_step
from halogen_core.spi import BackendOptions, TorchBackend
from halogen_triton import dense as fused
from halogen_triton.attention import HeadShape
from halogen_triton.backend import TritonBackend
from halogen_triton.launch import Launch, Rule
from halogen_triton.pointwise import qkv_rope_store, rotation
from halogen_triton.pointwise_kernels import SILU

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_backend import DEVICE, MODELS, SMALL, open_runner, steps
from test_triton_linear import TOLERANCE, near, normal
from test_triton_pointwise import pool

EPS = 1e-5
RULE = Rule(launch=Launch(block_n=16, block_k=32))


def stream_of(h, dtype):
    """A stream as a product leaves it (in tiles of 16), and its norm in float64."""
    x, w = normal(1, h, dtype=dtype, seed=7), normal(h, seed=8)
    tiles = torch.nn.functional.pad(x[0].float().square(), (0, -h % 16)).unflatten(0, (-1, 16))
    normed = fused.Normed(
        stream=x, weighted=(x.float() * w).to(dtype), squares=tiles.sum(1), weight=w, eps=EPS
    )
    x = x.double()
    return normed, x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "k"), [(32, 96), (33, 100)])
def test_a_product_over_a_norm(dtype, n, k):
    x, want = stream_of(k, dtype)
    w, bias = normal(n, k, dtype=dtype, seed=2), normal(n, dtype=dtype, seed=3)
    y = fused.dense(x, w, RULE, bias=bias)
    near(y, want @ w.double().T + bias.double())
    near(x.settled(), want)


def test_a_norm_of_more_tiles_than_are_summed_at_once():
    """16 x 1,100 elements: squares beyond the first 1,024 tiles count too."""
    x, want = stream_of(16 * 1100, torch.float32)
    w = normal(4, 16 * 1100, seed=2)
    near(fused.dense(x, w, RULE), want @ w.double().T)


def test_a_gate_over_a_norm():
    x, want = stream_of(96, torch.float32)
    w = normal(2 * 20, 96, seed=2) / 8
    y = fused.dense(x, w, RULE, activation=SILU.value)
    gate, up = (want @ w.double().T).chunk(2, 1)
    near(y, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "k"), [(32, 96), (33, 100)])
def test_into_the_stream(dtype, n, k):
    x, w = normal(1, k, dtype=dtype), normal(n, k, dtype=dtype, seed=2)
    residual, norm, bias = normal(1, n, dtype=dtype, seed=4), normal(n, seed=5), normal(n, seed=6)
    product = fused.Product(x, w, bias.to(dtype), RULE)
    got = fused.to_stream(product, residual, norm, EPS)
    near(got.stream, x.double() @ w.double().T + bias.to(dtype).double() + residual.double())
    near(got.weighted, got.stream.double() * norm.double())
    near(got.squares.sum(), got.stream.double().pow(2).sum())


@pytest.mark.parametrize(
    ("dtype", "neox", "slot"),
    [
        (torch.float32, True, 3),
        (torch.float32, False, -1),
        (torch.float16, False, 17),
        (torch.bfloat16, True, 8),
    ],
)
def test_into_heads(dtype, neox, slot):
    """Beside the product and `qkv_rope_store` apart (which is tested against float64)."""
    hq, hkv, d, k = 6, 2, 64, 96
    shape = HeadShape(num_heads=hq, num_kv_heads=hkv, head_dim=d, scale=1.0)
    x, want = stream_of(k, dtype)
    w, bias = (
        normal(*s, dtype=dtype, seed=2) for s in (((hq + 2 * hkv) * d, k), ((hq + 2 * hkv) * d,))
    )
    positions = torch.tensor([100_003], dtype=torch.int32, device=w.device)
    slots = torch.tensor([slot], dtype=torch.int64, device=w.device)
    inv = tuple(10000.0 ** (-2 * i / d) for i in range(d // 2))
    rope = rotation(inv, d, neox=neox, factor=1.2, device=w.device)
    product = fused.Product(x, w, bias, RULE)
    kv, apart = pool("f32", d=d, dtype=dtype), pool("f32", d=d)
    q = fused.to_heads(product, RULE, kv, positions, slots, shape, rope)
    qkv = (want @ w.double().T + bias.double()).float()
    near(q, qkv_rope_store(qkv, apart, positions, slots, shape, rope).double())
    if slot < 0:
        assert not kv.data.any(), "a padding row writes nothing"
    else:
        near(kv.data, apart.data.double())


def test_a_whole_model_decodes_as_on_plain_torch():
    """Of one row every edge of a layer is part of a product."""
    options = BackendOptions(extra={"dtype": "f32", "flash_threshold": "0"})
    backend = TritonBackend(options, tuning=SMALL, device=DEVICE)
    own = open_runner(backend, MODELS["qwen2 f32"])
    plain = open_runner(TorchBackend(BackendOptions(extra={"dtype": "f32"})), MODELS["qwen2 f32"])
    for items in list(steps())[1:]:
        batch = build_step(items, 16).batch
        got, want = own.logits(batch), plain.logits(batch)
        assert np.abs(got - want).max() <= 3e-5 * np.abs(want).max()
    # who serves an op in our place gets tensors
    ops, weight = backend.triton_ops, own.decoder.weights.layers[0].output
    x = normal(1, weight.shape[1])
    assert isinstance(ops.linear(x, weight), fused.Product)
    near(ops.settled(ops.linear(x, weight)), x.double() @ weight.payload.double().T)
    ops.gated_act = ops.gated_act
    assert isinstance(ops.linear(x, weight), torch.Tensor)
