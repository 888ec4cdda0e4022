"""Running one case on one bench, and saying exactly how it ended."""

from __future__ import annotations

import time
import traceback

import attrs

from halogen_conformance.bench import Bench
from halogen_conformance.case import Failure, Filtered, Result, Status, Unsupported
from halogen_core.spi import (
    ConfigError,
    HalogenError,
    PluginError,
    Support,
    SupportLevel,
    UnsupportedOp,
)

REFUSALS = (UnsupportedOp, ConfigError)


def execute(bench: Bench) -> Result:
    """The result of `bench.case`; never raises for a backend's fault."""
    case = bench.case
    began = time.perf_counter()
    support: Support | None = None
    output = ""
    try:
        support = _ask(bench)
        _run(bench, support)
        status, reason = Status.PASS, ""
    except Filtered as exc:
        status, reason = Status.FILTERED, str(exc)
    except Unsupported as exc:
        status, reason = Status.UNSUPPORTED, str(exc)
    except Failure as exc:
        status, reason = Status.FAIL, str(exc)
    except HalogenError as exc:
        status, reason = Status.FAIL, f"{type(exc).__name__}: {exc}"
        output = traceback.format_exc()
    except Exception as exc:
        where = traceback.extract_tb(exc.__traceback__)[-1]
        place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
        status, reason = Status.FAIL, f"{type(exc).__name__} at {place}: {exc}"
        output = traceback.format_exc()
    return Result(
        id=case.id,
        status=status,
        reason=reason[:2000],
        seconds=time.perf_counter() - began,
        level=str(support.level) if support else "",
        measurements=tuple(bench.measurements),
        facts=dict(bench.facts),
        output=output[-3000:],
    )


def _ask(bench: Bench) -> Support | None:
    """What the backend promises about the case's signature."""
    signature = bench.case.signature
    if signature is None:
        return None
    signature = attrs.evolve(signature, dtype=bench.dtype)
    support = bench.backend.supports(signature)
    if not isinstance(support, Support):
        raise Failure(f"`supports` returned {type(support).__name__}, not Support")
    if support != bench.backend.supports(signature):
        raise Failure("`supports` answers the same question differently")
    return support


def _run(bench: Bench, support: Support | None) -> None:
    """Hold the backend to its word: yes works, no refuses."""
    if support is None or support.level is not SupportLevel.NO:
        try:
            bench.case.run(bench)
        except UnsupportedOp as exc:
            if support is None:
                raise
            raise Failure(f"`supports` said {support.level}, the call was refused: {exc}") from exc
        return
    if not support.reasons:
        raise Failure("`supports` said no without a reason")
    try:
        bench.case.run(bench)
    except (*REFUSALS, HalogenError) as exc:
        if isinstance(exc, PluginError | ConfigError) or exc.code.startswith("HRT-2"):
            raise Unsupported("; ".join(support.reasons)) from exc
        raise
    except (Failure, Filtered):
        raise
    except Exception as exc:
        raise Failure(
            f"`supports` said no ({'; '.join(support.reasons)}); the call must raise "
            f"UnsupportedOp, it raised {type(exc).__name__}: {exc}"
        ) from exc
    raise Failure(f"`supports` said no ({'; '.join(support.reasons)}), but the call works")
