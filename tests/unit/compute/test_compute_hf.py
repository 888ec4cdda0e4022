"""Tiny seeded models equal Hugging Face transformers in float32, every architecture."""

import numpy as np
import pytest
import torch
import transformers

from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import TorchBackend
from halogen_core.spi.testing import TINY_MODELS, Share, f32_tensor, step_batch, tiny_checkpoint

TOKENS = [int(t) for t in np.random.default_rng(8).integers(0, 97, 40)]
CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
}
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def values(tensor):
    return torch.from_numpy(tensor.data.view(np.float32).reshape(tensor.shape).copy())


def hf_state(checkpoint, kind, model):
    """Our tensors under transformers' names, experts fused as the model wants them."""
    names = {**NAMES, **(GEMMA if kind == "gemma3" else {})}
    state = {"model.embed_tokens.weight": values(checkpoint.tensor("token_embd.weight"))}
    state["model.norm.weight"] = values(checkpoint.tensor("output_norm.weight"))
    head = "output.weight" if "output.weight" in checkpoint.names() else "token_embd.weight"
    state["lm_head.weight"] = values(checkpoint.tensor(head))
    experts = {}
    for name in checkpoint.names():
        if not name.startswith("blk."):
            continue
        _, layer, stem, ending = name.split(".")
        if stem.endswith("_exps"):
            experts.setdefault(layer, {})[stem] = values(checkpoint.tensor(name))
        else:
            state[f"model.layers.{layer}.{names[stem]}.{ending}"] = values(checkpoint.tensor(name))
    for layer, parts in experts.items():
        at = f"model.layers.{layer}.mlp.experts"
        state[f"{at}.gate_up_proj"] = torch.cat([parts["ffn_gate_exps"], parts["ffn_up_exps"]], 1)
        state[f"{at}.down_proj"] = parts["ffn_down_exps"]
    if kind == "gemma3":
        # Gemma's norms multiply by 1 + w; GGUF and we store 1 + w
        state = {k: v - 1 if "norm" in k else v for k, v in state.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("rotary" in name or "inv_freq" in name for name in missing), missing
    return model


def hf_logits(checkpoint, kind, **extra):
    h = checkpoint.hparams
    config_class, model_class = CLASSES[kind]
    config = getattr(transformers, config_class)(
        hidden_size=h["embedding_length"],
        intermediate_size=h["feed_forward_length"],
        num_hidden_layers=h["block_count"],
        num_attention_heads=h["attention.head_count"],
        num_key_value_heads=h["attention.head_count_kv"],
        head_dim=h["attention.key_length"],
        vocab_size=h["vocab_size"],
        max_position_embeddings=h["context_length"],
        rms_norm_eps=h["attention.layer_norm_rms_epsilon"],
        tie_word_embeddings="output.weight" not in checkpoint.names(),
        attn_implementation="eager",
        **extra,
    )
    model = getattr(transformers, model_class)(config).float().eval()
    hf_state(checkpoint, kind, model)
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def our_logits(checkpoint, chunks=(40,)):
    backend = TorchBackend()
    config = config_of(checkpoint)
    decoder = Decoder.load(config, checkpoint, backend)
    kv = backend.kv_alloc(backend.kv_layout(kv_spec(config, dtype="f32", block_size=8)), 8)
    parts, start = [], 0
    for count in chunks:
        share = Share(
            tokens=tuple(TOKENS[start : start + count]),
            blocks=(6, 2, 7, 0, 5),
            start=start,
            all_logits=True,
        )
        meta = backend.upload_step(step_batch([share], 8))
        parts.append(backend.download(decoder.logits(backend.ops, meta, kv)))
        start += count
    return np.concatenate(parts)


MOE = {
    "num_experts_per_tok": 3,
    "num_experts": 8,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
CASES = {
    "llama": ("llama", {}, {}),
    "llama untied": ("llama", {"tied": False, "kv_heads": 1}, {}),
    "llama biased": ("llama", {"qkv_bias": True, "output_bias": True}, {"attention_bias": True}),
    "llama linear": (
        "llama",
        {"extra": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama yarn": (
        "llama",
        {
            "context": 128,
            "extra": {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("mistral", {"window": 9}, {"sliding_window": 9}),
    "mixtral": (
        "mixtral",
        {"experts": 6, "inner": 40, "tied": False},
        {
            "num_experts_per_tok": 2,
            "num_local_experts": 6,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3moe": ("qwen3moe", {}, MOE),
    "gemma3": (
        "gemma3",
        {},
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            },
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name):
    kind, changes, extra = CASES[name]
    checkpoint = tiny_checkpoint(kind if kind in TINY_MODELS else "llama", seed=4, **changes)
    want = hf_logits(checkpoint, kind, **extra)
    scale = np.abs(want).std()
    np.testing.assert_allclose(our_logits(checkpoint) / scale, want / scale, atol=1e-4, rtol=0)
    chunked = our_logits(checkpoint, (1, 1, 11, 27))
    np.testing.assert_allclose(chunked / scale, want / scale, atol=1e-4, rtol=0)


def test_llama3_divisors_equal_transformers():
    """GGUF holds Llama 3.1's scaling as divisors of the frequencies."""
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=rope
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    checkpoint = tiny_checkpoint("llama", seed=4)
    divisors = f32_tensor("rope_freqs.weight", plain / rotary.inv_freq.numpy())
    tensors = {**checkpoint.tensors, "rope_freqs.weight": divisors}
    scaled = type(checkpoint)(architecture="llama", hparams=checkpoint.hparams, tensors=tensors)
    want = hf_logits(checkpoint, "llama", rope_parameters=rope)
    np.testing.assert_allclose(our_logits(scaled), want, atol=1e-4 * want.std(), rtol=0)
    assert np.abs(our_logits(checkpoint) - want).max() > 0.01
