"""Models as the seam sees them: a checkpoint's tensors and hyper-parameters, and a decoder's shape.

Both speak GGUF's vocabulary (tensor names `blk.0.attn_q.weight`, keys `block_count`), whatever file
they come from; a loader of another format translates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import attrs

from halogen_core.spi.operations import Activation, AttentionSpec, MoESpec, QuantTensor, RopeStyle


class Checkpoint(Protocol):
    """An opened model. Raises `ModelError` for what is missing or damaged."""

    @property
    def path(self) -> str: ...

    @property
    def architecture(self) -> str:
        """GGUF's name: `llama`, `qwen2`, `qwen3`, `qwen3moe`, `gemma3`."""
        ...

    @property
    def hparams(self) -> Mapping[str, Any]:
        """GGUF keys without the architecture prefix, e.g. `attention.head_count_kv`."""
        ...

    @property
    def rope_style(self) -> RopeStyle:
        """How the stored Q and K rows pair up (GGUF llama is permuted, Hugging Face is not)."""
        ...

    @property
    def content_id(self) -> str:
        """A stable hash of what the weights are, for caches and snapshots."""
        ...

    def names(self) -> Collection[str]:
        """All tensor names."""
        ...

    def tensor(self, name: str) -> QuantTensor:
        """One tensor in its stored format, a view of the file where it can be."""
        ...


@attrs.frozen(kw_only=True)
class LayerConfig:
    """One decoder layer."""

    attention: AttentionSpec
    moe: MoESpec | None = None
    sinks: bool = False


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """A decoder-only transformer, all that the core's model code needs to know."""

    architecture: str
    layers: tuple[LayerConfig, ...]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    activation: Activation = Activation.SILU
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    """Norms after attention and after the MLP too, before the residual is added (Gemma 3)."""
    tied_embeddings: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)
