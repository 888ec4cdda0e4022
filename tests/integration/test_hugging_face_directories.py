"""What transformers saves, we open from disk and compute alike, every architecture and rope."""

import json

import numpy as np
import pytest
import torch
import transformers

from halogen_core.errors import ModelError
from halogen_core.loader import open_model
from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import TorchBackend
from halogen_core.spi.testing import Share, step_batch

VOCAB = 97
TOKENS = [int(t) for t in np.random.default_rng(8).integers(0, VOCAB, 40)]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **more}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"original_max_position_embeddings": 32}
GEMMA_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]


def gemma_rope(kind, **more):
    full = {"rope_type": kind, "rope_theta": 1e6, **more}
    return {
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }


GEMMA = {"layer_types": GEMMA_TYPES, "sliding_window": 8, "query_pre_attn_scalar": 20}
CASES = {
    "llama": ("Llama", {}),
    "llama untied": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biased": ("Llama", {"attention_bias": True}),
    "llama linear": ("Llama", rope("linear")),
    "llama llama3": ("Llama", rope("llama3", **LLAMA3)),
    "llama yarn": ("Llama", rope("yarn", **YARN)),
    "llama yarn betas": ("Llama", rope("yarn", **YARN, beta_fast=16.0, beta_slow=2.0)),
    "llama yarn factor": ("Llama", rope("yarn", **YARN, attention_factor=1.4)),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "mistral whole": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen2 windowed": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "qwen3moe plain": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "norm_topk_prob": False}),
    "gemma3": ("Gemma3", {**GEMMA, **gemma_rope("default")}),
    "gemma3 linear": ("Gemma3", {**GEMMA, **gemma_rope("linear", factor=8.0)}),
}


def build(kind, changes):
    torch.manual_seed(4)
    name = "Gemma3Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key or "bias" in key:
                value.add_(torch.randn_like(value) * 0.1)
    return model


def our_logits(path):
    checkpoint = open_model(path)
    backend, config = TorchBackend(), config_of(checkpoint)
    decoder = Decoder.load(config, checkpoint, backend)
    kv = backend.kv_alloc(backend.kv_layout(kv_spec(config, dtype="f32", block_size=8)), 8)
    share = Share(tokens=tuple(TOKENS), blocks=(6, 2, 7, 0, 5), start=0, all_logits=True)
    meta = backend.upload_step(step_batch([share], 8))
    return backend.download(decoder.logits(backend.ops, meta, kv))


@pytest.mark.parametrize("name", CASES)
def test_a_saved_model_computes_alike(name, tmp_path):
    model = build(*CASES[name])
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0].numpy()
    scale = want.std()
    np.testing.assert_allclose(our_logits(tmp_path) / scale, want / scale, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_files_are_read_exactly(dtype, tmp_path):
    model = build("Gemma3", {**GEMMA, **gemma_rope("default")}).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    wide = type(model).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        want = wide(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(our_logits(tmp_path), want, atol=1e-4 * want.std(), rtol=0)


def test_several_files_with_an_index(tmp_path):
    model = build("Qwen3", {})
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(our_logits(tmp_path), want, atol=1e-4 * want.std(), rtol=0)


@pytest.mark.parametrize("old", ["rope_scaling", "type"])
def test_configurations_of_transformers_4_mean_the_same(old, tmp_path):
    model = build("Llama", rope("linear"))
    model.save_pretrained(tmp_path)
    want = our_logits(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    new = config.pop("rope_parameters")
    key = "rope_type" if old == "rope_scaling" else "type"
    config["rope_theta"] = new["rope_theta"]
    config["rope_scaling"] = {key: "linear", "factor": new["factor"]}
    file.write_text(json.dumps(config))
    np.testing.assert_array_equal(our_logits(tmp_path), want)


REFUSED = {
    "awq of 3 bits": ({"quantization_config": {"quant_method": "awq", "bits": 3}}, "HRT-2011", "3"),
    "fp8 of other codes": (
        {"quantization_config": {"quant_method": "fp8", "fmt": "e3m4"}},
        "HRT-2011",
        "e3m4",
    ),
    "unknown type": ({"model_type": "rwkv7"}, "HRT-2005", "rwkv7"),
    "no type": ({"model_type": None}, "HRT-2005", "None"),
    "dynamic rope": ({"rope_parameters": {"rope_type": "dynamic"}}, "HRT-2014", "dynamic"),
    "other activation": ({"hidden_act": "relu"}, "HRT-2014", "relu"),
    "layers a text": ({"num_hidden_layers": "many"}, "HRT-2014", "many"),
    "layers 10^9": ({"num_hidden_layers": 10**9}, "HRT-2007", "1000000000"),
    "no heads": ({"num_attention_heads": 0}, "HRT-2007", "head_count"),
    "heads missing": ({"num_attention_heads": None}, "HRT-2014", "num_attention_heads"),
    "partial mlp": ({"mlp_only_layers": [1]}, "HRT-2014", "dense"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unfit_configurations_are_refused(name, tmp_path):
    changes, code, word = REFUSED[name]
    build("Llama", {}).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelError, match=word) as failure:
        open_model(tmp_path)
    assert failure.value.code == code
    assert str(tmp_path) in failure.value.message


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a":' * 5000 + "1" + "}" * 5000])
def test_damaged_config_json_is_refused(content, tmp_path):
    build("Llama", {}).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError) as failure:
        open_model(tmp_path)
    assert failure.value.code == "HRT-2014"
