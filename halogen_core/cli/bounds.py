"""Bounds on rates that follow from a device's profile for a model.

Whatever is derived here is a bound, never a speed: steps per second are at most bandwidth over the
bytes that a step reads, and at most compute over its operations.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import attrs

from halogen_core.cli.profiles import Profile, stored_bytes
from halogen_core.loader.sizes import used_names
from halogen_core.spi import (
    Checkpoint,
    DecoderConfig,
    KVSpec,
    LayerConfig,
    QuantTensor,
    kv_row_bytes,
)


def kv_bytes_per_token(decoder: DecoderConfig, dtype: str) -> int:
    """K and V of all layers."""
    return sum(_kv_bytes(layer, dtype) for layer in decoder.layers)


def kv_read_bytes(decoder: DecoderConfig, dtype: str, context: int) -> int:
    """KV that one decoding step reads at a full context; windows read less."""
    return sum(
        _kv_bytes(layer, dtype) * min(context, layer.attention.window or context)
        for layer in decoder.layers
    )


def _kv_bytes(layer: LayerConfig, dtype: str) -> int:
    spec = layer.attention
    row = KVSpec(num_layers=1, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype)
    return 2 * spec.num_kv_heads * kv_row_bytes(row)


@attrs.frozen(kw_only=True)
class ActiveWeights:
    """The weights that one token meets; of experts only the chosen ones."""

    bytes: int
    """On the device."""
    elements: int
    head: int
    """Of `elements`, those of the output head: of a prompt only the last token meets it."""


def active_weights(
    checkpoint: Checkpoint,
    decoder: DecoderConfig,
    kept: Callable[[QuantTensor], int] = stored_bytes,
) -> ActiveWeights:
    """What a token reads and multiplies with; `kept` tells the bytes of a tensor on the device."""
    moe = decoder.layers[0].moe
    share = moe.top_k / moe.num_experts if moe else 1.0
    answers = "token_embd.weight" if decoder.tied_embeddings else "output.weight"
    size = elements = 0.0
    head = 0
    for name in used_names(checkpoint, decoder):
        if name == "token_embd.weight" != answers:
            continue
        tensor = checkpoint.tensor(name)
        part = share if "_exps." in name else 1.0
        size += part * kept(tensor)
        elements += part * prod(tensor.shape)
        head += prod(tensor.shape) if name == answers else 0
    return ActiveWeights(bytes=int(size), elements=int(elements), head=head)


@attrs.frozen(kw_only=True)
class Load:
    """What a measured rate was about, as far as bounds depend on it."""

    weight_bytes: int
    """That one token reads."""
    elements: int
    """Weights that one token multiplies with."""
    head: int = 0
    """Those of the output head among them."""
    kv_bytes: int = 0
    """That one sequence reads per step."""
    sequences: int = 1
    experts: tuple[int, int] | None = None
    """(chosen, all) of a mixture: more sequences read more of them."""

    @property
    def step_bytes(self) -> float:
        """Least bytes of one decode step; weights are read once for all sequences."""
        share = 1.0
        if self.experts is not None:
            chosen, count = self.experts
            met = count * (1 - (1 - chosen / count) ** self.sequences)
            share = max(1.0, met / chosen)
        return self.weight_bytes * share + self.kv_bytes * self.sequences


def decode_bound(load: Load, bandwidth: float, compute: float | None) -> float:
    """Tokens per second that decoding cannot exceed, without speculation."""
    by_bytes = load.sequences * bandwidth / load.step_bytes
    return by_bytes if compute is None else min(by_bytes, compute / (2 * load.elements))


def prefill_bound(load: Load, compute: float) -> float:
    """Prompt tokens per second that cannot be exceeded; the head is the last token's alone."""
    return compute / (2 * (load.elements - load.head))


def bounds(
    decoder: DecoderConfig,
    profile: Profile,
    active: ActiveWeights,
    *,
    kv_bytes: int,
    together: int,
) -> dict[str, dict[str, float]]:
    """Upper bounds on tokens per second by kind of rate: of one stream, with an empty and a full
    context of `kv_bytes`, and of `together` full streams in sum.
    """
    moe = decoder.layers[0].moe
    one = Load(
        weight_bytes=active.bytes,
        elements=active.elements,
        head=active.head,
        experts=None if moe is None else (moe.top_k, moe.num_experts),
    )

    def decode(load: Load) -> dict[str, float]:
        compute = {kind: "peak" if kind == "peak" else "tuned" for kind in profile.bandwidth}
        return {
            kind: decode_bound(load, bandwidth, profile.compute.get(compute[kind]))
            for kind, bandwidth in profile.bandwidth.items()
        }

    return {
        "decode_tok_s_empty": decode(one),
        "decode_tok_s_full": decode(attrs.evolve(one, kv_bytes=kv_bytes)),
        "decode_tok_s_together": decode(attrs.evolve(one, kv_bytes=kv_bytes, sequences=together)),
        "prefill_tok_s": {k: prefill_bound(one, v) for k, v in profile.compute.items()},
    }


def verdict(rate: float, best: float | None, peak: float | None) -> str:
    """`impossible` over the theoretical peak, `speculative` over the best that was measured."""
    if peak is not None and rate > peak:
        return "impossible"
    if best is not None and rate > best:
        return "speculative"
    return "within the bound" if best is not None or peak is not None else "no bound known"
