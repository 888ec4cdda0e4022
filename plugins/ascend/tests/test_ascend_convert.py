"""A model converted layer by layer runs with the formats it was given, near the original."""

import json

import numpy as np
import pytest
from ascend_steps import BLOCK, open_sim, step
from safetensors.numpy import save_file

from halogen_core.loader import open_model
from halogen_core.loader.convert import QuantPlan, convert_directory
from halogen_core.models import Decoder, config_of
from halogen_core.spi import KVSpec

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, LAYERS = 64, 4, 2, 64, 96, 120, 2
LAYERED = {
    "embedding": "fp16",
    "attention.qkv": "w8a8",
    "attention.out": "w8a16",
    "ffn.w1": "w8a16",
    "ffn.w2": "w8a8",
}


@pytest.fixture
def original(tmp_path):
    rng = np.random.default_rng(0)

    def weight(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float16)

    tensors = {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN) * np.float16(4),
        "model.norm.weight": np.ones(HIDDEN, np.float16),
        "lm_head.weight": weight(VOCAB, HIDDEN) * np.float16(4),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}input_layernorm.weight": np.ones(HIDDEN, np.float16),
            f"{at}post_attention_layernorm.weight": np.ones(HIDDEN, np.float16),
            f"{at}self_attn.q_proj.weight": weight(HEADS * DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": weight(KV_HEADS * DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": weight(KV_HEADS * DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": weight(HIDDEN, HEADS * DIM),
            f"{at}mlp.gate_proj.weight": weight(INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": weight(INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": weight(HIDDEN, INNER),
        }
    folder = tmp_path / "original"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 256,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits_of(folder, backend):
    checkpoint = open_model(folder)
    config = config_of(checkpoint)
    decoder = Decoder.load(config, checkpoint, backend)
    spec = KVSpec(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=BLOCK)
    kv = backend.kv_alloc(backend.kv_layout(spec), 2)
    batch = step([(list(range(1, 40)), 0, [0])], all_logits=True)
    made = decoder.logits(backend.ops, backend.upload_step(batch), kv)
    return decoder, backend.download(made).astype(np.float64)


def test_layered_formats_reach_the_device_and_the_answer(original, tmp_path):
    convert_directory(original, tmp_path / "int8", QuantPlan.of(LAYERED))
    plain, want = logits_of(original, open_sim())
    small, got = logits_of(tmp_path / "int8", open_sim())
    layer = small.weights.layers[0]
    assert {n: getattr(layer, n).payload.scheme for n in ("qkv", "output", "gate_up", "down")} == {
        "qkv": "W8A8",
        "output": "W8A16",
        "gate_up": "W8A16",
        "down": "W8A8",
    }
    assert layer.qkv.payload.buffer.dtype == "i8"
    assert small.weights.embedding.payload.buffer.dtype == "f16"
    assert small.weights.head.payload.scheme == "plain"
    assert small.nbytes < 0.75 * plain.nbytes
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (want, got))
    assert (p * np.log(p / q)).sum(-1).mean() < 0.02
    assert (p.argmax(-1) == q.argmax(-1)).mean() > 0.8
    assert not np.array_equal(want, got)


def test_rope_rows_that_are_not_aligned_are_warned_of(caplog):
    with caplog.at_level("WARNING", "halogen_ascend"):
        open_sim(rope_align=128)
        assert not caplog.records
        open_sim(rope_align=64)
    assert "not aligned to 128 bytes" in caplog.text


def test_rope_rows_are_aligned(backend):
    from ascend_steps import Config
    from ascend_steps import Decoder as Tiny

    for align in (128, 512):
        made = open_sim(rope_align=align)
        tiny = Tiny(made, Config(layers=1), blocks=2)
        tiny.logits(step([([1] * 3, 0, [0])]))
        (table,) = made.ops.rope._tables.values()
        assert table.shape[1] * 4 % align == 0
        assert table.allocation.address % align == 0
        assert table.allocation.pool == "static"
