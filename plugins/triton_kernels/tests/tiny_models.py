"""Seeded tiny checkpoints of every shape that the kernels know, without files."""

import attrs
import gguf
import numpy as np

from halogen_core.spi import FORMATS, QuantTensor, RopeStyle


@attrs.frozen(kw_only=True)
class TinyCheckpoint:
    """`spi.Checkpoint` over a dict."""

    architecture: str
    hparams: dict
    tensors: dict
    path: str = "tiny"
    rope_style: RopeStyle = RopeStyle.NEOX
    content_id: str = "tiny"

    def names(self):
        return self.tensors.keys()

    def tensor(self, name):
        return self.tensors[name]


def quant_tensor(name, values, form):
    kind = gguf.GGMLQuantizationType(FORMATS[form].ggml_type)
    if form == "BF16":
        raw = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif form in ("F32", "F16"):
        raw = values.astype(np.float32 if form == "F32" else np.float16)
    else:
        try:
            raw = gguf.quantize(values.astype(np.float32), kind)
        except NotImplementedError:
            raw = random_k_blocks(values, form)
    return QuantTensor(
        format=form,
        shape=values.shape,
        data=np.ascontiguousarray(raw).reshape(-1).view(np.uint8),
        name=name,
    )


def random_k_blocks(values, form):
    """K-quant bytes of about the size of `values`; gguf cannot quantise to them."""
    rng = np.random.default_rng(values.size)
    fmt = FORMATS[form]
    lead = (*values.shape[:-1], values.shape[-1] // fmt.block)
    raw = rng.integers(0, 256, (*lead, fmt.bytes), dtype=np.uint8)
    scale = {"Q4_K": 1 / 400, "Q5_K": 1 / 800, "Q6_K": 1 / 1600}[form] * values.std() * 2
    for at, factor in {"Q6_K": [(208, 1)]}.get(form, [(0, 1), (2, 7 if form == "Q4_K" else 14)]):
        d = np.full(lead, scale * factor * 0.25, np.float16)
        raw[..., at : at + 2] = d[..., None].view(np.uint8)
    return raw


def tiny(
    architecture="qwen2",
    *,
    form="F32",
    v_form=None,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    inner=96,
    vocab=128,
    layers=2,
    experts=0,
    seed=0,
):
    rng = np.random.default_rng(seed)
    tensors = {}

    def add(name, *shape, fmt="F32", centre=0.0, spread=None):
        spread = shape[-1] ** -0.5 if spread is None else spread
        values = centre + rng.normal(size=shape) * spread
        tensors[name] = quant_tensor(name, values, fmt)

    add("token_embd.weight", vocab, hidden, fmt=form, spread=1.0)
    add("output_norm.weight", hidden, centre=1.0, spread=0.1)
    add("output.weight", vocab, hidden, fmt=form, spread=0.5)
    for i in range(layers):
        at = f"blk.{i}."
        for norm in ("attn_norm", "ffn_norm"):
            add(f"{at}{norm}.weight", hidden, centre=1.0, spread=0.1)
        sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
        for name, count in sizes.items():
            fmt = v_form if name == "v" and v_form else form
            add(f"{at}attn_{name}.weight", count * head_dim, hidden, fmt=fmt)
            if architecture == "qwen2":
                add(f"{at}attn_{name}.bias", count * head_dim, spread=0.1)
            if architecture.startswith("qwen3") and name != "v":
                add(f"{at}attn_{name}_norm.weight", head_dim, centre=1.0, spread=0.1)
        add(f"{at}attn_output.weight", hidden, heads * head_dim, fmt=form)
        lead, suffix = ((experts,), "_exps") if experts else ((), "")
        if experts:
            add(f"{at}ffn_gate_inp.weight", experts, hidden)
        add(f"{at}ffn_gate{suffix}.weight", *lead, inner, hidden, fmt=form)
        add(f"{at}ffn_up{suffix}.weight", *lead, inner, hidden, fmt=form)
        add(f"{at}ffn_down{suffix}.weight", *lead, hidden, inner, fmt=form)
    hparams = {
        "block_count": layers,
        "context_length": 512,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "vocab_size": vocab,
        "expert_count": experts,
        "expert_used_count": 2,
        "expert_feed_forward_length": inner,
    }
    return TinyCheckpoint(architecture=architecture, hparams=hparams, tensors=tensors)
