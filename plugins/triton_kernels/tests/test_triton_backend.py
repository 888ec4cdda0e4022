"""Whole tiny models on the Triton backend (interpreter) against the plain torch backend."""

import os
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest

from halogen_core.engine.batch import BatchItem, build_step
from halogen_core.engine.protocol import SamplingParams
from halogen_core.engine.runner import Runner
from halogen_core.engine.sampler import RowSampler
from halogen_core.models import Decoder, config_of
from halogen_core.spi import (
    BackendOptions,
    ConfigError,
    KVSpec,
    MemoryRequest,
    TorchBackend,
    WeightRole,
)
from halogen_triton.backend import GRAPH_BYTES, TritonBackend
from halogen_triton.launch import Launch, Rule, Tuning

sys.path.insert(0, str(Path(__file__).parent))
from tiny_models import quant_tensor, tiny

DEVICE = os.environ.get("HALOGEN_TEST_DEVICE", "cpu")
SMALL = Tuning(
    arch="test",
    source="test",
    rules={
        "prefill": (Rule(launch=Launch(block_m=16, block_n=16)),),
        "decode": (Rule(launch=Launch(block_n=16), programs=5),),
        "dense_gemv": (Rule(launch=Launch(block_n=64, block_k=64)),),
        "plane_gemv": (Rule(launch=Launch(block_n=64, block_k=256)),),
        "dense_gemm": (Rule(launch=Launch(block_m=16, block_n=64, block_k=64)),),
        "plane_gemm": (Rule(launch=Launch(block_m=16, block_n=64, block_k=256)),),
        "int8_gemm": (Rule(launch=Launch(block_m=16, block_n=64, block_k=64)),),
    },
)
GREEDY = RowSampler.start(SamplingParams(), [], seed=0)


def triton_backend(**extra):
    options = BackendOptions(extra={"dtype": "f32", **extra})
    return TritonBackend(options, tuning=SMALL, device=DEVICE)


def open_runner(backend, checkpoint, dtype="f32", block_size=16):
    config = config_of(checkpoint)
    decoder = Decoder.load(config, checkpoint, backend)
    heads = config.layers[0].attention
    layout = backend.kv_layout(
        KVSpec(
            num_layers=config.num_layers,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            dtype=dtype,
            block_size=block_size,
        )
    )
    return Runner(backend, decoder, backend.kv_alloc(layout, 12))


def item(tokens, start, count, blocks):
    return BatchItem(
        token_ids=tokens, start=start, count=count, block_table=blocks, sampler=GREEDY, samples=True
    )


def steps():
    """A prompt, a chunk beside a decoding sequence, then two sequences decoding."""
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 128, 40).tolist(), rng.integers(0, 128, 24).tolist()
    one, two = [7, 2, 4], [1, 9]
    yield [item(a, 0, 20, one)]
    yield [item(a, 20, 1, one), item(b, 0, 20, two)]
    yield [item(a, 21, 12, one), item(b, 20, 1, two)]
    yield [item(a, 33, 1, one), item(b, 21, 1, two)]
    yield [item(a, 34, 1, one)]


MODELS = {
    "qwen2 f32": tiny(),
    "qwen3 f16": tiny("qwen3", form="F16"),
    "llama q8_0": tiny("llama", form="Q8_0"),
    "llama mixed": tiny("llama", form="Q4_0", v_form="Q5_0"),
    "moe": tiny("qwen3moe", experts=4),
    "moe q4_1": tiny("qwen3moe", experts=4, form="Q4_1"),
}


QUICK = {("llama mixed", "0")}
EVERY = [
    pytest.param(name, flash, marks=() if (name, flash) in QUICK else pytest.mark.slow)
    for name in MODELS
    for flash in ("0", "1000")
]


@pytest.mark.parametrize(("name", "flash"), EVERY)
def test_logits_of_mixed_steps(name, flash):
    own = open_runner(triton_backend(flash_threshold=flash), MODELS[name])
    plain = open_runner(
        TorchBackend(BackendOptions(extra={"dtype": "f32"}), name="torch"), MODELS[name]
    )
    for items in steps():
        batch = build_step(items, 16).batch
        got, want = own.logits(batch), plain.logits(batch)
        assert np.abs(got - want).max() <= 3e-5 * np.abs(want).max()


@pytest.mark.parametrize("form", ["Q8_0", "F16"])
def test_a_table_is_known_by_its_name_too(form):
    """What was read or unpacked lies in memory that the next tensor gets."""
    backend = triton_backend()
    rng = np.random.default_rng(1)
    one, two = (quant_tensor(n, rng.normal(0, 1, (32, 64)), form) for n in ("one", "two"))
    memory = np.array(one.data)
    packed = []
    for tensor in (one, two):
        memory[:] = tensor.data
        packed.append(backend.pack([attrs.evolve(tensor, data=memory)], WeightRole.LINEAR))
    alone = triton_backend()
    for weight, tensor in zip(packed, (one, two), strict=True):
        expected = alone.unpack(alone.pack([tensor], WeightRole.LINEAR))
        assert (backend.unpack(weight) == expected).all()


@pytest.mark.parametrize("form", ["Q8_0", "F16", "F32"])
def test_a_tied_table_is_held_once(form):
    backend, checkpoint = triton_backend(), tiny(form=form)
    apart = Decoder.load(config_of(checkpoint), checkpoint, backend).nbytes
    assert backend.counters().gauges["static_bytes"] == apart
    del checkpoint.tensors["output.weight"]
    backend = triton_backend()
    weights = Decoder.load(config_of(checkpoint), checkpoint, backend).weights
    assert weights.embedding.payload is weights.head.payload
    assert weights.nbytes == apart - weights.embedding.nbytes
    assert backend.counters().gauges["static_bytes"] == weights.nbytes


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kv_dtype", ["q8_0", pytest.param("f16", marks=SLOW), pytest.param("f8_e5m2", marks=SLOW)]
)
def test_kv_blocks_travel_in_canonical_form(kv_dtype):
    checkpoint = tiny(head_dim=32)
    own = open_runner(triton_backend(), checkpoint, kv_dtype)
    plain = open_runner(
        TorchBackend(BackendOptions(extra={"dtype": "f32"}), name="torch"), checkpoint, kv_dtype
    )
    first, *_ = steps()
    for runner in (own, plain):
        runner.logits(build_step(first, 16).batch)
    blocks = own.backend.kv_export(own.kv, [7, 2])
    again = plain.backend.kv_export(plain.kv, [7, 2])
    # one stored step either way: the activations differ in their last bits
    same = (blocks.data == again.data).mean()
    assert same > 0.98
    plain.backend.kv_import(plain.kv, [7, 2], blocks)
    assert (plain.backend.kv_export(plain.kv, [7, 2]).data == blocks.data).all()
    with pytest.raises(ConfigError, match="this pool takes"):
        plain.backend.kv_import(plain.kv, [7], blocks)
    with pytest.raises(ConfigError, match="this pool takes"):
        own.backend.kv_import(own.kv, [7], blocks)
    own.backend.kv_copy(own.kv, [(7, 0), (2, 1)])
    assert (own.backend.kv_export(own.kv, [0, 1]).data == blocks.data).all()
    other = open_runner(triton_backend(), checkpoint, kv_dtype)
    other.backend.kv_import(other.kv, [7, 2], blocks)
    batch = build_step([item(first[0].token_ids, 20, 1, [7, 2, 4])], 16).batch
    assert np.array_equal(other.logits(batch), own.logits(batch))


def test_tied_tables_are_held_once():
    backend = triton_backend()
    table = quant_tensor(
        "token_embd.weight", np.random.default_rng(0).normal(size=(32, 64)), "Q8_0"
    )
    first = backend.pack([table], WeightRole.EMBEDDING)
    second = backend.pack([table], WeightRole.LINEAR)
    assert first.payload is second.payload
    plain = TorchBackend(name="torch").pack([table], WeightRole.LINEAR)
    assert np.array_equal(backend.unpack(first), plain.payload.numpy())


def test_every_op_is_native_or_says_why():
    placements = {p.op: p for p in triton_backend().placement()}
    fallbacks = {op for op, p in placements.items() if p.level != "native"}
    assert fallbacks == {"add", "select_rows"}
    assert all(placements[op].reasons for op in fallbacks)


def test_impossible_routings_are_refused_as_supports_says():
    import torch

    from halogen_core.spi import MoESpec, OpSignature, UnsupportedOp
    from halogen_triton.moe import route

    spec = MoESpec(num_experts=4, top_k=5)
    denied = triton_backend().supports(OpSignature(op="moe", moe=spec))
    assert denied.level == "no"
    with pytest.raises(UnsupportedOp, match="5 of 4 experts"):
        route(torch.zeros(1, 4), spec)


def test_captured_steps_are_in_the_plan():
    backend = triton_backend()
    layout = backend.kv_layout(KVSpec(num_layers=1, num_kv_heads=1, head_dim=16))
    request = MemoryRequest(static_bytes=0, temp_bytes=0, kv_layout=layout, kv_bytes=1 << 20)

    def graph_bytes():
        return {pool.name: pool.bytes for pool in backend.plan(request).pools}["graph"]

    for graphs, expected in ((False, 0), (True, GRAPH_BYTES)):
        backend._graphs = graphs
        assert graph_bytes() == expected
