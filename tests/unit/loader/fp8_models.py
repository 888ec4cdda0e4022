"""Seeded models of transformers, their layers in fp8, and the logits of what is stored, in float64.

The sizes leave ragged blocks: 160 and 200 are no multiples of 128.
"""

import numpy as np
import torch
from fp8_files import Fp8, write_fp8

from halogen_core.loader import open_model
from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi.testing import Share, step_batch

TOKENS = [int(t) for t in np.random.default_rng(8).integers(0, 97, 23)]
SIZES = {
    "vocab_size": 97,
    "hidden_size": 160,
    "intermediate_size": 200,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
    "experts_implementation": "eager",
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 136}


def write_model(directory, form, kind="Qwen3"):
    """Logits [T, V] float64 of `TOKENS`, after the model was written to `directory`."""
    # here, so that tests of weights run where there is no transformers
    import transformers

    torch.manual_seed(5)
    more = MOE if "Moe" in kind else {}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    model.save_pretrained(directory)
    rounder = Fp8(form)
    written = _saved(directory)
    write_fp8(directory, rounder, written, config.to_dict())
    exact = {k: torch.from_numpy(v).double() for k, v in written.items()}
    exact |= {f"{k}.weight": torch.from_numpy(v) for k, v in rounder.values.items()}
    return _logits(model.double(), exact)


def _saved(directory):
    """What transformers saved, by its names; norms moved away from one."""
    from safetensors.numpy import load_file

    random = np.random.default_rng(2)
    state = load_file(directory / "model.safetensors")
    moved = {k: random.standard_normal(v.shape) / 10 for k, v in state.items() if "norm" in k}
    return state | {k: (state[k] + v).astype(np.float32) for k, v in moved.items()}


def _logits(model, state):
    """Of the model with these float64 weights."""
    own = model.state_dict()
    for key in own:
        if key not in state:
            state[key] = _fused(key, state)
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def _fused(key, state):
    """Experts that transformers holds as one tensor and saves one by one."""
    layer, name = key.rsplit(".", 1)
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[name]
    experts = range(MOE["num_experts"])
    each = [torch.cat([state[f"{layer}.{e}.{p}.weight"] for p in parts]) for e in experts]
    return torch.stack(each)


def our_logits(directory, backend, kv_dtype="f32"):
    """Of `TOKENS` by a backend: float32 [T, V]."""
    checkpoint = open_model(directory)
    config = config_of(checkpoint)
    decoder = Decoder.load(config, checkpoint, backend)
    layout = backend.kv_layout(kv_spec(config, dtype=kv_dtype, block_size=16))
    kv = backend.kv_alloc(layout, 4)
    share = Share(tokens=tuple(TOKENS), blocks=(3, 1), start=0, all_logits=True)
    return backend.download(
        decoder.logits(backend.ops, backend.upload_step(step_batch([share], 16)), kv)
    )


def distance(got, want):
    """Largest difference of logits in standard deviations of theirs."""
    return np.abs(got - want).max() / want.std()
