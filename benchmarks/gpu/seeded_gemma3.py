"""A seeded checkpoint with Gemma 3's layers: local and global attention, norms on both sides.

Heads, widths and norms are those of Gemma 3 270M; layers, vocabulary and window are fewer, so that
a short run crosses the window and a global layer. The head has weights of its own: tied to random
embeddings it would only repeat its input.
"""

from __future__ import annotations

import attrs
import numpy as np

from halogen_core.spi import QuantTensor, RopeStyle

HIDDEN, INNER, HEADS, D, LAYERS, VOCAB, WINDOW = 640, 2048, 4, 256, 6, 8192, 24
NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
TABLES = ("token_embd.weight", "output.weight")
HPARAMS = {
    "block_count": LAYERS,
    "context_length": 512,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 1,
    "attention.key_length": D,
    "attention.value_length": D,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": WINDOW,
    "rope.freq_base": 1e6,
    "vocab_size": VOCAB,
}


@attrs.frozen
class SeededGemma3:
    """`spi.Checkpoint`; every tensor is drawn from its name."""

    architecture: str = "gemma3"
    path: str = "seeded"
    content_id: str = "seeded"
    rope_style: RopeStyle = RopeStyle.NEOX
    hparams: dict = attrs.field(factory=lambda: dict(HPARAMS))

    def names(self) -> list[str]:
        layers = [f"blk.{i}.{stem}.weight" for i in range(LAYERS) for stem in _shapes()]
        return [*TABLES, "output_norm.weight", *layers]

    def tensor(self, name: str) -> QuantTensor:
        if name in TABLES:
            shape: tuple[int, ...] = (VOCAB, HIDDEN)
        else:
            shape = (HIDDEN,) if name == "output_norm.weight" else _shapes()[name.split(".")[2]]
        rng = np.random.default_rng(list(name.encode()))
        values = rng.normal(size=shape).astype(np.float32)
        # norms about 1; products of a layer about as large as what goes in
        values = 1 + 0.1 * values if len(shape) == 1 else values * shape[-1] ** -0.5
        values = 4 * values if name == "output.weight" else values
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return QuantTensor(format="F32", shape=shape, data=raw, name=name)


def _shapes() -> dict[str, tuple[int, ...]]:
    return {
        **dict.fromkeys(NORMS, (HIDDEN,)),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (D,)),
        "attn_q": (HEADS * D, HIDDEN),
        **dict.fromkeys(("attn_k", "attn_v"), (D, HIDDEN)),
        "attn_output": (HIDDEN, HEADS * D),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (INNER, HIDDEN)),
        "ffn_down": (HIDDEN, INNER),
    }
