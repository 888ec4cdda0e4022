"""Records of identity, advice and contributions that cross the seam. Data only, all frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import attrs


@attrs.frozen(kw_only=True)
class BackendSpec:
    """A backend that a plugin offers; `factory` is `"pkg.mod:create"` so nothing heavy loads."""

    name: str
    factory: str
    aliases: tuple[str, ...] = ()
    priority: int = 0
    """Higher wins when the user names no backend."""
    ahead_factory: str = ""
    """As `factory`, for a backend that compiles for the device without having it: its arrays have
    shapes and no values. Empty: there is none."""


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


@attrs.frozen(kw_only=True)
class Limits:
    """What a step may hold at most; None: no limit of the backend's own."""

    max_tokens: int | None = None
    max_sequences: int | None = None
    max_context: int | None = None
    token_buckets: tuple[int, ...] = ()
    """Step sizes with a captured graph; `halogen selftest` compiles and `bench` measures these."""


@attrs.frozen(kw_only=True)
class StepShape:
    """A step's size, for the cost model."""

    prefill_tokens: int
    decode_sequences: int
    kv_tokens: int
    """KV tokens read, summed over sequences."""
    prefill_pairs: int = 0
    """Pairs of a prompt's token and a token it attends to: what attention computes for prompts,
    which `kv_tokens` cannot tell (a chunk late in a long prompt reads as much, computes more)."""


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
