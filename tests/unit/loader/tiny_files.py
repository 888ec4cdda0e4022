"""Tiny model files, written by the formats' own libraries."""

import json

import gguf
import numpy as np
from safetensors.numpy import save_file

HIDDEN, HEADS, KV_HEADS, DIM, INNER, LAYERS = 32, 4, 2, 8, 64, 2
TOKENS = ["<unk>", "<s>", "</s>", *(chr(97 + i) for i in range(26)), "Ġ", "ab", "Ġa"]
KINDS = [2, 3, 3, *([1] * 29)]


def llama_shapes():
    """GGUF name -> row-major shape of a tiny llama."""
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HEADS * DIM, HIDDEN),
            f"blk.{i}.attn_k.weight": (KV_HEADS * DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": (KV_HEADS * DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HEADS * DIM),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, INNER),
        }
    return shapes


def write_llama(path, *, shapes=None, metadata=(), arch="llama", split_max_tensors=0, drop=()):
    """A tiny GGUF file; `metadata` are calls `(method, *args)` on the writer, `drop` keys."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_max_tensors)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for method, *args in metadata:
        getattr(writer, method)(*args)
    for key in drop:
        writer.kv_data[0].pop(key)
    random = np.random.default_rng(7)
    for name, shape in (shapes or llama_shapes()).items():
        dtype = np.float32 if len(shape) == 1 else np.float16
        writer.add_tensor(name, random.standard_normal(shape).astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


HF_CONFIG = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "vocab_size": len(TOKENS),
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name):
    """The Hugging Face name of a tiny llama's tensor."""
    *block, stem, kind = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{HF_NAMES[stem]}.{kind}"


def write_hf(directory, **config):
    """A directory with config.json and model.safetensors (float16)."""
    random = np.random.default_rng(7)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        hf_name(name): random.standard_normal(shape).astype(np.float16)
        for name, shape in llama_shapes().items()
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**HF_CONFIG, **config}))
    return directory
