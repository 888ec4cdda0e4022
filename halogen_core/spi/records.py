"""Records that cross the seam between core and backends. Data only, all frozen.

Shape letters, here and everywhere: T tokens in the step, S sequences, R rows needing logits,
H hidden, Hq/Hkv query/KV heads, D head dim, F feed-forward, V vocabulary, E experts, N blocks,
B block size in tokens, M blocks per sequence, L layers. Host arrays are numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Generic, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

Array = TypeVar("Array")
"""A device array: a `torch.Tensor` or any opaque handle. Core code is generic over it, so the
type checker proves that the core only passes arrays between ops and never computes on one."""

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


# ---------------------------------------------------------------- identity and probing


@attrs.frozen(kw_only=True)
class BackendSpec:
    """A backend that a plugin offers; `factory` is `"pkg.mod:create"` so nothing heavy loads."""

    name: str
    factory: str
    aliases: tuple[str, ...] = ()
    priority: int = 0
    """Higher wins when the user names no backend."""


@attrs.frozen(kw_only=True)
class DeviceInfo:
    """One device a probe found."""

    id: str
    """`backend:index`, e.g. `rocm_strixhalo:0`."""
    name: str
    arch: str = ""
    driver: str = ""
    memory_bytes: int | None = None


@attrs.frozen(kw_only=True)
class Reason:
    """Why something is as it is: stable `code`, a sentence, and what to do."""

    code: str
    text: str
    hint: str = ""


@attrs.frozen(kw_only=True)
class ProbeContext:
    """What a probe may know; `device` is what the user asked for, e.g. `ascend:sim:910B2`."""

    device: str | None = None
    options: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class ProbeResult:
    """`score` 0 means: not on this machine, see `reasons`; the highest score wins a tie."""

    score: int
    devices: tuple[DeviceInfo, ...] = ()
    reasons: tuple[Reason, ...] = ()


@attrs.frozen(kw_only=True)
class BackendOptions:
    """How the core asks a factory for a backend: `create(options) -> Backend`."""

    device: str | None = None
    """`backend[:index-or-profile]` as the user wrote it; None: the backend's first device."""
    threads: int | None = None
    deterministic: bool = False
    """Ask for run-to-run and batch-invariant results where the backend can give them."""
    cache_dir: str | None = None
    """Where compiled kernels and packed weights may be kept; None: nothing is cached on disk."""
    extra: Mapping[str, str] = attrs.field(factory=dict)
    """`--backend-option key=value`; a backend refuses keys it does not know."""


# ---------------------------------------------------------------- weights


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


# ---------------------------------------------------------------- operations


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


# ---------------------------------------------------------------- one step


@attrs.frozen(kw_only=True, eq=False)
class StepBatch:
    """One step on the host side, flat, built by the core. int32 unless noted.

    Sequences' tokens lie one after another: sequence s owns rows query_start_loc[s] to
    query_start_loc[s + 1]. A token's KV goes to `slot_mapping` = block * B + offset.
    """

    token_ids: Int32
    """[T]"""
    positions: Int32
    """[T]"""
    slot_mapping: Int64
    """[T]"""
    query_start_loc: Int32
    """[S + 1]"""
    seq_lens: Int32
    """[S] tokens of the sequence in the KV cache after this step's writes."""
    block_tables: Int32
    """[S, M], unused entries are -1."""
    logit_rows: Int32
    """[R] rows of T whose logits are wanted, ascending."""
    sampling: SamplingBatch
    """Of the R rows."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start_loc).max(initial=0))

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max(initial=0))


@attrs.frozen(kw_only=True, eq=False)
class StepMeta(Generic[Array]):
    """One step as ops see it: device arrays beside the host batch.

    Some vendors want lengths on the host, some on the device: both are here.
    """

    host: StepBatch
    token_ids: Array
    positions: Array
    slot_mapping: Array
    query_start_loc: Array
    seq_lens: Array
    block_tables: Array
    logit_rows: Array
    sampling: Any
    """The backend's own device form of `host.sampling`."""


@attrs.frozen(kw_only=True, eq=False)
class SamplingBatch:
    """How each of R rows picks its token. Order of application: penalties, bias, mask,
    temperature, softmax, top-k, top-p, min-p, then inverse CDF in token-id order with `uniforms`.

    Neutral values: temperature 0 is greedy (lowest id wins a tie), top_k 0, top_p 1, min_p 0,
    repetition_penalty 1, presence and frequency penalty 0.
    """

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    repetition_penalty: Float32
    presence_penalty: Float32
    frequency_penalty: Float32
    uniforms: Float32
    """[R] in [0, 1), made by the core from (seed, sequence, position): a seed gives the same
    token whatever shares the batch, and no device needs a random generator."""
    forced: Int32
    """[R] token to report instead of sampling (prompt log-probabilities); -1: sample."""
    history_start: Int32
    """[R + 1] rows into `history_ids`."""
    history_ids: Int32
    """Distinct tokens seen so far by penalised rows."""
    history_counts: Int32
    """Times each was generated (0: only in the prompt). Repetition penalty looks at presence in
    either, presence and frequency penalties at generated counts."""
    bias_start: Int32
    """[R + 1] rows into `bias_ids`."""
    bias_ids: Int32
    bias_values: Float32
    mask: NDArray[np.uint32] | None = None
    """[R, ceil(V / 32)] allowed tokens, little-endian bits (grammars); None: all."""
    num_logprobs: int = -1
    """-1: none, 0: of the chosen token, n: also the n most likely."""

    @property
    def num_rows(self) -> int:
        return len(self.temperature)

    @property
    def all_greedy(self) -> bool:
        return not self.temperature.any()


@attrs.frozen(kw_only=True, eq=False)
class Sampled(Generic[Array]):
    """What `sample` leaves on the device; downloading it is the step's one synchronisation.

    Log-probabilities are of the model's own distribution (before penalties and temperature).
    """

    token_ids: Array
    """[R] int32"""
    logprobs: Array | None = None
    """[R] float32, of the chosen token."""
    top_ids: Array | None = None
    """[R, n] int32, most likely first."""
    top_logprobs: Array | None = None
    """[R, n] float32"""


# ---------------------------------------------------------------- advice and telemetry


@attrs.frozen(kw_only=True)
class Limits:
    """What a step may hold at most; None: no limit of the backend's own."""

    max_tokens: int | None = None
    max_sequences: int | None = None
    max_context: int | None = None
    preferred_chunk: int | None = None
    """Tokens of a prompt chunk that the device works best on."""
    token_buckets: tuple[int, ...] = ()
    """Step sizes with a captured graph; a scheduler may prefer them."""


@attrs.frozen(kw_only=True)
class StepShape:
    """A step's size, for the cost model."""

    prefill_tokens: int
    decode_sequences: int
    kv_tokens: int
    """KV tokens read, summed over sequences."""


@attrs.frozen(kw_only=True)
class Cost:
    """Predicted time of a step in seconds."""

    p50: float
    p95: float


@attrs.frozen(kw_only=True)
class Telemetry:
    """Counters and sensors, by stable name; values are numbers in base units."""

    counters: Mapping[str, float] = attrs.field(factory=dict)
    gauges: Mapping[str, float] = attrs.field(factory=dict)


# ---------------------------------------------------------------- what plugins contribute


@attrs.frozen(kw_only=True)
class OpImplementation:
    """An op for somebody else's backend (a kernel pack); `factory` is `"pkg.mod:make"`.

    The factory is called with the backend and returns a callable with the op's signature.
    """

    op: str
    backend: str
    factory: str
    supports: str
    """`"pkg.mod:fn"`, called with an `OpSignature`, returns `Support`."""
    priority: int = 0


class Severity(StrEnum):
    """Of a doctor's finding."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@attrs.frozen(kw_only=True)
class Finding:
    """One line of `halogen doctor`."""

    code: str
    severity: Severity
    text: str
    fix: str = ""
    evidence: str = ""


@attrs.frozen(kw_only=True)
class DoctorContext:
    """Where a check looks: `root` is prefixed to every path, so fixture trees can stand in."""

    root: str = "/"
    environment: Mapping[str, str] = attrs.field(factory=dict)
    commands: Mapping[str, str] = attrs.field(factory=dict)
    """Captured output by command line, instead of running it (fixtures)."""
    live: bool = True
    """May run commands and import drivers; False: judge only `root` and `commands`."""


@attrs.frozen(kw_only=True)
class PolicySpec:
    """A scheduling or eviction policy by name; `factory` is `"pkg.mod:create"`."""

    name: str
    factory: str
    description: str = ""


@attrs.frozen(kw_only=True)
class FormatSpec:
    """A weight format, model loader or architecture by name; `factory` is `"pkg.mod:attr"`."""

    name: str
    factory: str
    description: str = ""


@attrs.frozen(kw_only=True)
class ConformanceExtras:
    """A vendor's additions: extra cases, gaps that must really fail, tighter tolerances."""

    cases: Sequence[str] = ()
    """`"pkg.mod:cases"` factories."""
    declared_gaps: Mapping[str, str] = attrs.field(factory=dict)
    """Case id -> reason; an unexpected pass fails."""
    tolerances: Mapping[str, float] = attrs.field(factory=dict)
    """Op -> factor below 1 on the suite's tolerance."""
