"""What a case is, how it may end, and the errors by which it says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import attrs

from halogen_core.spi import OpSignature

if TYPE_CHECKING:
    from halogen_conformance.bench import Bench


class Status(StrEnum):
    """How a case ended. Only PASS, WAIVED and XFAIL are good; FILTERED and UNSUPPORTED count."""

    PASS = "PASS"
    FAIL = "FAIL"
    CRASH = "CRASH"
    TIMEOUT = "TIMEOUT"
    UNSUPPORTED = "UNSUPPORTED"
    """`supports` said no, and the call was refused as promised."""
    WAIVED = "WAIVED"
    XFAIL = "XFAIL"
    XPASS = "XPASS"
    """A declared gap that passes: a failure, the declaration is stale."""
    FILTERED = "FILTERED"
    """Needs something that `capabilities()` does not claim."""
    NOT_RUN = "NOT_RUN"


BAD = frozenset({Status.FAIL, Status.CRASH, Status.TIMEOUT, Status.XPASS, Status.NOT_RUN})


class Failure(Exception):
    """The backend did something it must not do."""


class Filtered(Exception):
    """The case needs what the backend does not claim; the message names the capability."""


class Unsupported(Exception):
    """The backend said no to the signature and refused the call."""


@attrs.frozen(kw_only=True)
class Opening:
    """How a case wants its backend opened; None: as the backend prefers."""

    dtype: str | None = None
    deterministic: bool = False


@attrs.frozen(kw_only=True)
class Case:
    """One question to a backend. The id says which, not with what values; values come from it."""

    id: str
    topic: str
    """The op (L1) or the promise (other levels): the row of the report's matrix."""
    why: str
    """Which defect it is there to catch."""
    run: Callable[[Bench], None]
    column: str = ""
    """Storage format or dtype: the column of the matrix."""
    opening: Opening = Opening()
    signature: OpSignature | None = None
    required: bool = True
    """Must pass for a certificate unless FILTERED by a capability; never UNSUPPORTED."""
    timeout_s: float = 60.0
    device: bool = True
    """Needs the backend opened; L0 cases do not."""
    alone: bool = attrs.field()
    """Nothing else of the suite may run meanwhile: it measures time, or memory, which depends on
    neighbours and on what its process did before."""

    @alone.default
    def _alone_by_level(self) -> bool:
        return self.id[1] in "0245"

    @property
    def level(self) -> int:
        return int(self.id[1])


@attrs.frozen(kw_only=True)
class Measurement:
    """One comparison with the oracle."""

    what: str
    error: float
    """Largest difference, in units of the row's root mean square."""
    reference: float
    """The same of the same-dtype reference."""
    allowed: float

    @property
    def ratio(self) -> float:
        """Above 1 fails."""
        return self.error / self.allowed if self.allowed else float(self.error > 0) * 1e9


@attrs.frozen(kw_only=True)
class Result:
    """How one case ended on one backend."""

    id: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    level: str = ""
    """`native` or `fallback`, from `supports`."""
    measurements: tuple[Measurement, ...] = ()
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    """Other numbers worth reporting: slopes, bandwidths."""
    output: str = ""
    """What the backend printed or where it raised, at its worst moments only."""

    @property
    def worst(self) -> float:
        return max((m.ratio for m in self.measurements), default=0.0)
