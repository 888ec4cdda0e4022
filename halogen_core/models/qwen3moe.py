"""Qwen 3 MoE: Qwen 3 with softmax-routed experts in place of the MLP."""

from __future__ import annotations

from halogen_core.models.hparams import attention_specs, decoder_config, required
from halogen_core.spi import Checkpoint, DecoderConfig, MoESpec

_GATING = {1: "softmax", 2: "sigmoid"}


def config(checkpoint: Checkpoint) -> DecoderConfig:
    return decoder_config(checkpoint, attention_specs(checkpoint), moe=moe_spec(checkpoint))


def moe_spec(checkpoint: Checkpoint) -> MoESpec:
    """Routing as the hyper-parameters say; chosen weights are normalised unless they say not."""
    h = checkpoint.hparams
    return MoESpec(
        num_experts=int(required(checkpoint, "expert_count")),
        top_k=int(required(checkpoint, "expert_used_count")),
        gating=_GATING[int(h.get("expert_gating_func") or 1)],
        normalize_top_k=bool(h.get("expert_weights_norm", True)),
        weight_scale=float(h.get("expert_weights_scale") or 1.0),
    )
