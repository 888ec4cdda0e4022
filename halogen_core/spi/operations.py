"""Weights and the static description of operations, frozen records.

Shape letters, here and everywhere: T tokens in the step, S sequences, R rows needing logits,
H hidden, Hq/Hkv query/KV heads, D head dim, F feed-forward, V vocabulary, E experts, N blocks,
B block size in tokens, M blocks per sequence, L layers. Host arrays are numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Generic

import attrs
from numpy.typing import NDArray

from halogen_core.errors import ModelError
from halogen_core.spi.arrays import Array, Bytes


class WeightRole(StrEnum):
    """What a weight is for; a backend may lay each role out differently."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    NORM = "norm"
    BIAS = "bias"
    EXPERTS = "experts"
    SINKS = "sinks"


@attrs.frozen(kw_only=True, eq=False)
class QuantTensor:
    """A weight on the host in its stored format.

    `shape` is logical, row-major, output features first: [N, K], experts [E, N, K]. `data` is the
    raw bytes (uint8, 1-D), often a view of a memory-mapped file; `format` is a key of `FORMATS`.
    Formats with separate scales (int4 AWQ/GPTQ, int8, fp8) carry them in `aux`.
    """

    format: str
    shape: tuple[int, ...]
    data: Bytes
    name: str = ""
    aux: Mapping[str, NDArray[Any]] = attrs.field(factory=dict)


def misfit(tensor: QuantTensor, reason: str) -> ModelError:
    """The refusal (HRT-2411) of a tensor whose bytes are not what format and shape say."""
    sizes = {key: value.shape for key, value in tensor.aux.items()}
    return ModelError(
        f"tensor `{tensor.name}` of format `{tensor.format}` and shape {tensor.shape} has "
        f"{tensor.data.size} bytes{f' and {sizes}' if sizes else ''}: {reason}",
        code="HRT-2411",
        fix="the file is damaged or was converted wrongly; fetch or convert it again",
    )


@attrs.frozen(kw_only=True, eq=False)
class PackedWeight(Generic[Array]):
    """A weight as the backend keeps it; only `shape` and `nbytes` mean something to the core.

    A fused weight has `parts` output sizes (for example Q, K and V rows of one matrix).
    """

    payload: Any
    shape: tuple[int, ...]
    nbytes: int
    format_id: str
    role: WeightRole
    parts: tuple[int, ...] = ()


class RopeStyle(StrEnum):
    """Which elements of a head are rotated together."""

    NEOX = "neox"
    """Half-split: element i with i + dim/2 (GPT-NeoX, Hugging Face)."""
    INTERLEAVED = "interleaved"
    """Neighbours: element 2i with 2i + 1 (RoFormer, GGUF llama)."""


@attrs.frozen(kw_only=True)
class RopeSpec:
    """Rotary embedding (Su et al., RoFormer, 2021), scaling already folded into `inv_freq`.

    Angle of pair i at position p is `p * inv_freq[i]`; cos and sin are multiplied by
    `attention_factor` (YaRN). The first `dim` elements of a head rotate, the rest pass through.
    """

    dim: int
    inv_freq: tuple[float, ...]
    style: RopeStyle = RopeStyle.NEOX
    attention_factor: float = 1.0


@attrs.frozen(kw_only=True)
class AttentionSpec:
    """Everything static about one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None = None
    window: int | None = None
    """A query at position p sees keys p - window + 1 .. p; None: all."""
    softcap: float | None = None
    """Logits become `softcap * tanh(logits / softcap)` before masking (Gemma 2)."""
    norm_eps: float = 1e-6
    """Of the per-head Q and K RMSNorm, where the layer has one (Qwen 3, Gemma 3)."""


class Activation(StrEnum):
    """Gated activations: `act(gate) * up` over [T, 2F] with gate first."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    SWIGLU_OAI = "swiglu_oai"
    """gpt-oss: gate and up clamped to 7, `gate * sigmoid(1.702 * gate) * (up + 1)`."""


@attrs.frozen(kw_only=True)
class MoESpec:
    """Routing of a mixture-of-experts layer: softmax or sigmoid over router logits, then top-k."""

    num_experts: int
    top_k: int
    activation: Activation = Activation.SILU
    gating: str = "softmax"
    normalize_top_k: bool = True
    """Divide the chosen weights by their sum."""
    weight_scale: float = 1.0


@attrs.frozen(kw_only=True)
class OpSignature:
    """A question to `supports`: value-free, so an answer may be cached."""

    op: str
    dtype: str = "f32"
    weight_format: str | None = None
    kv_dtype: str | None = None
    block_size: int | None = None
    attention: AttentionSpec | None = None
    moe: MoESpec | None = None
    activation: Activation | None = None


class SupportLevel(StrEnum):
    """`native` and `fallback` are promises that the call works; `no` promises `UnsupportedOp`."""

    NATIVE = "native"
    FALLBACK = "fallback"
    NO = "no"


@attrs.frozen(kw_only=True)
class Support:
    """The answer to an `OpSignature`, with the reasons for anything but native."""

    level: SupportLevel
    reasons: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Placement:
    """Where one op runs and why; the start-up report and metrics are made of these."""

    op: str
    level: SupportLevel
    implementation: str
    reasons: tuple[str, ...] = ()
