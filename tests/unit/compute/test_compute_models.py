"""Whole tiny models: opaque arrays, batch invariance, typed errors, extension."""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halogen_core.errors import ModelError
from halogen_core.models import Decoder, config_of, dense_config, kv_spec
from halogen_core.spi import Activation, BackendOptions, FormatSpec, InvariantTorchOps, TorchBackend
from halogen_core.spi.testing import (
    TINY_MODELS,
    Handle,
    OpaqueBackend,
    Share,
    f32_tensor,
    greedy_sampling,
    step_batch,
    tiny_checkpoint,
)

BLOCK = 8
DETERMINISTIC = BackendOptions(deterministic=True)


class Model:
    def __init__(self, backend, checkpoint, kv_dtype="f32"):
        self.backend = backend
        config = config_of(checkpoint)
        self.decoder = Decoder.load(config, checkpoint, backend)
        layout = backend.kv_layout(kv_spec(config, dtype=kv_dtype, block_size=BLOCK))
        self.kv = backend.kv_alloc(layout, 64)

    def logits(self, shares):
        meta = self.backend.upload_step(step_batch(shares, BLOCK))
        return self.backend.download(self.decoder.logits(self.backend.ops, meta, self.kv))

    def greedy(self, prompt, count, blocks=(9, 3, 30, 1, 12)):
        tokens, start = list(prompt), 0
        for _ in range(count):
            share = Share(tokens=tuple(tokens[start:]), blocks=blocks, start=start)
            meta = self.backend.upload_step(step_batch([share], BLOCK))
            sampled = self.decoder.step(self.backend.ops, meta, self.kv)
            start = len(tokens)
            tokens.append(int(self.backend.download(sampled.token_ids)[0]))
        return tokens[len(prompt) :]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_opaque_arrays_give_the_same_tokens(name):
    """The core passes arrays between ops and computes on none: handles refuse everything else."""
    checkpoint, prompt = tiny_checkpoint(name, seed=2), [5, 1, 90, 33, 33, 7, 2, 64, 11]
    opaque = OpaqueBackend()
    want = Model(TorchBackend(), checkpoint).greedy(prompt, 12)
    assert Model(opaque, checkpoint).greedy(prompt, 12) == want
    counters = opaque.counters().counters
    assert counters["fallback_calls_sample"] == 12
    assert counters["fallback_bytes_down"] > 0


def test_handles_refuse_everything():
    handle, tensor = Handle(np.ones(3)), torch.ones(3)
    attempts = {
        "torch function": lambda: torch.add(tensor, handle),
        "numpy array": lambda: np.asarray(handle),
        "__add__": lambda: handle + handle,
        "__getitem__": lambda: handle[0],
        "__bool__": lambda: bool(handle),
        "__len__": lambda: len(handle),
    }
    for name, attempt in attempts.items():
        with pytest.raises(TypeError, match=name):
            attempt()
    with pytest.raises(AttributeError, match="shape"):
        _ = handle.shape


@st.composite
def workloads(draw):
    """Sequences, and each one's chunks."""
    count = draw(st.integers(1, 4))
    chunks = st.lists(st.integers(1, 14), min_size=1, max_size=4)
    return draw(st.lists(chunks, min_size=count, max_size=count))


@pytest.mark.parametrize("name", ["llama", "llama-sinks", "qwen3moe", "gemma3"])
@given(workload=workloads(), seed=st.integers(0, 1000))
@settings(max_examples=12, deadline=None)
def test_deterministic_mode_is_batch_invariant(name, workload, seed):
    """Chunked and together = whole and alone, to the bit."""
    model = invariant_model(name)
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, 97, sum(chunks)).tolist() for chunks in workload]
    tables = np.array_split(rng.permutation(64)[: 8 * len(tokens)].tolist(), len(tokens))
    together = [[] for _ in tokens]
    starts = [0] * len(tokens)
    for turn in range(max(map(len, workload))):
        live = [i for i, chunks in enumerate(workload) if turn < len(chunks)]
        shares = []
        for i in live:
            count = workload[i][turn]
            chunk = tuple(tokens[i][starts[i] : starts[i] + count])
            shares.append(
                Share(tokens=chunk, blocks=tuple(tables[i]), start=starts[i], all_logits=True)
            )
            starts[i] += count
        rows = np.split(model.logits(shares), np.cumsum([len(s.tokens) for s in shares])[:-1])
        for i, part in zip(live, rows, strict=True):
            together[i].append(part)
    for i, sequence in enumerate(tokens):
        share = Share(tokens=tuple(sequence), blocks=tuple(range(8)), all_logits=True)
        np.testing.assert_array_equal(np.concatenate(together[i]), model.logits([share]))


_MODELS = {}


def invariant_model(name):
    if name not in _MODELS:
        _MODELS[name] = Model(TorchBackend(DETERMINISTIC), tiny_checkpoint(name, seed=1), "f16")
    return _MODELS[name]


def test_the_claim_of_invariance_follows_the_mode():
    assert TorchBackend(DETERMINISTIC).capabilities().batch_invariant
    assert not TorchBackend().capabilities().batch_invariant


class OneRowDiffers(InvariantTorchOps):
    """What MKL does without tiles: another kernel for a single row."""

    def matmul(self, x, weight, bias=None):
        return super().matmul(x, weight, bias) + (1e-6 if len(x) == 1 else 0)


class Boastful(TorchBackend):
    invariant_ops_class = OneRowDiffers


def test_invariance_is_checked_here_before_it_is_claimed():
    assert not Boastful(DETERMINISTIC).capabilities().batch_invariant


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("inner", "outer"), [(576, 960), (63, 257), (1536, 64)])
def test_invariant_products_at_model_shapes(threads, inner, outer):
    """What torch's CPU kernels need: the same bits at every height and place, threads or not."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ops = TorchBackend(DETERMINISTIC).ops
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(outer, inner, generator=generator)
        x = torch.randn(41, inner, generator=generator)
        whole, gate = ops.matmul(x, weight), ops.gated_act(torch.cat((x, x), 1), Activation.SILU)
        gelu = ops.gated_act(torch.cat((x, x), 1), Activation.GELU_TANH)
        for start, end in ((0, 1), (3, 4), (40, 41), (0, 7), (5, 22), (1, 41)):
            part = x[start:end].clone()
            assert torch.equal(ops.matmul(part, weight), whole[start:end])
            double = torch.cat((part, part), 1)
            assert torch.equal(ops.gated_act(double, Activation.SILU), gate[start:end])
            assert torch.equal(ops.gated_act(double, Activation.GELU_TANH), gelu[start:end])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("quant", ["Q4_0", "Q5_1", "Q8_0", "F16", "BF16", "Q4_K", "Q5_K", "Q6_K"])
def test_a_quantised_model_equals_its_dequantised_twin(quant):
    big = {"hidden": 256, "inner": 256, "layers": 1}
    checkpoint = tiny_checkpoint("llama", quant=quant, **big)
    backend = TorchBackend()
    from halogen_core.spi import WeightRole

    tensors = {
        name: f32_tensor(name, backend.unpack(backend.pack([part], WeightRole.EMBEDDING)))
        if len(part.shape) > 1
        else part
        for name, part in checkpoint.tensors.items()
    }
    assert {t.format for t in checkpoint.tensors.values()} == {"F32", quant}
    twin = attrs.evolve(checkpoint, tensors=tensors)
    share = [Share(tokens=(1, 2, 3, 4), blocks=(4,), all_logits=True)]
    got, want = Model(backend, checkpoint).logits(share), Model(backend, twin).logits(share)
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()


def test_rows_that_are_not_wanted_change_nothing():
    checkpoint = tiny_checkpoint("qwen3moe")
    model, tokens = Model(TorchBackend(), checkpoint), (5, 9, 2, 8, 8, 1)
    every = model.logits([Share(tokens=tokens, blocks=(0,), all_logits=True)])
    last = model.logits([Share(tokens=tokens, blocks=(1,))])
    np.testing.assert_allclose(last[0], every[-1], rtol=1e-5, atol=1e-5)


def test_a_step_without_rows_only_fills_the_cache():
    model = Model(TorchBackend(), tiny_checkpoint("llama"))
    batch = step_batch([Share(tokens=(1, 2, 3), blocks=(0,))], BLOCK)
    batch = attrs.evolve(batch, logit_rows=np.zeros(0, np.int32), sampling=greedy_sampling(0))
    sampled = model.decoder.step(model.backend.ops, model.backend.upload_step(batch), model.kv)
    assert model.backend.download(sampled.token_ids).shape == (0,)
    assert model.backend.kv_export(model.kv, [0]).data.any()


# ---------------------------------------------------------------- errors and extension


def load(checkpoint):
    return Decoder.load(config_of(checkpoint), checkpoint, TorchBackend())


def without(checkpoint, name):
    kept = {k: v for k, v in checkpoint.tensors.items() if k != name}
    return attrs.evolve(checkpoint, tensors=kept)


def with_hparam(checkpoint, key, value):
    hparams = {**checkpoint.hparams, key: value}
    if value is None:
        del hparams[key]
    return attrs.evolve(checkpoint, hparams=hparams)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama", "blk.1.ffn_down.weight"),
        ("llama", "output_norm.weight"),
        ("qwen2", "blk.0.attn_k.bias"),
        ("qwen3moe", "blk.1.ffn_up_exps.weight"),
        ("gemma3", "blk.3.post_ffw_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(name, tensor):
    with pytest.raises(ModelError, match=f"`{tensor}` is missing") as info:
        load(without(tiny_checkpoint(name), tensor))
    assert info.value.code == "HRT-2404"


def test_a_wrong_shape_is_named_with_both_shapes():
    checkpoint = tiny_checkpoint("llama")
    wrong = f32_tensor("blk.0.attn_k.weight", np.zeros((32, 47), np.float32))
    checkpoint.tensors["blk.0.attn_k.weight"] = wrong
    with pytest.raises(ModelError, match=r"attn_k.weight.*\(32, 47\).*\(32, 48\)") as info:
        load(checkpoint)
    assert info.value.code == "HRT-2405"


def test_bytes_that_do_not_fit_are_named():
    checkpoint = tiny_checkpoint("llama")
    tensor = checkpoint.tensors["blk.0.ffn_up.weight"]
    checkpoint.tensors["blk.0.ffn_up.weight"] = attrs.evolve(tensor, data=tensor.data[:-4])
    with pytest.raises(ModelError, match="blk.0.ffn_up.weight") as info:
        load(checkpoint)
    assert info.value.code == "HRT-2411"


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("block_count", None, "HRT-2402"),
        ("attention.head_count", None, "HRT-2402"),
        ("feed_forward_length", None, "HRT-2402"),
        ("embedding_length", "48", "HRT-2403"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "HRT-2403"),
        ("attention.head_count_kv", 3, "HRT-2403"),
        ("attention.head_count_kv", [2, 1], "HRT-2403"),
        ("attention.value_length", 8, "HRT-2403"),
        ("rope.dimension_count", 17, "HRT-2403"),
        ("attention.sliding_window_pattern", [True], "HRT-2403"),
    ],
)
def test_a_bad_hyper_parameter_is_named(key, value, code):
    with pytest.raises(ModelError, match=key) as info:
        load(with_hparam(tiny_checkpoint("llama"), key, value))
    assert info.value.code == code


def test_unknown_rope_scaling_is_named():
    checkpoint = with_hparam(tiny_checkpoint("llama"), "rope.scaling.type", "longrope")
    with pytest.raises(ModelError, match="longrope") as info:
        load(with_hparam(checkpoint, "rope.scaling.factor", 4.0))
    assert info.value.code == "HRT-2406"


def test_per_layer_values_that_agree_are_one_value():
    checkpoint = with_hparam(tiny_checkpoint("llama"), "attention.head_count_kv", [2, 2])
    assert config_of(checkpoint) == config_of(tiny_checkpoint("llama"))


def test_an_unknown_architecture_lists_the_known_ones():
    checkpoint = attrs.evolve(tiny_checkpoint("llama"), architecture="mamba")
    with pytest.raises(ModelError, match="gemma3, llama, qwen2, qwen3, qwen3moe") as info:
        config_of(checkpoint)
    assert info.value.code == "HRT-2401"


def test_a_plugin_adds_an_architecture():
    checkpoint = attrs.evolve(tiny_checkpoint("llama"), architecture="lama")
    spec = FormatSpec(name="lama", factory="halogen_core.models:dense_config")
    assert config_of(checkpoint, [spec]) == dense_config(checkpoint)
