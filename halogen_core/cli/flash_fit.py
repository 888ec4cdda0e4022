"""Where splitting a sequence's attention over the device begins to pay.

Steps of growing context are timed on both paths, one after the other so that drift hits both; the
threshold is the cut with the least total regret, then moved to where the curves cross.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from halogen_core.engine.engine import Engine
from halogen_core.engine.rehearsal import Part, StepKind, rehearse
from halogen_core.errors import ConfigError
from halogen_core.spi import Adjustable

KEY = "flash_threshold"
NEVER = 1 << 30


@attrs.frozen(kw_only=True)
class FlashFit:
    """Step times by context, and the threshold that follows. Seconds, tokens."""

    contexts: tuple[int, ...]
    direct: tuple[float, ...]
    flash: tuple[float, ...]

    @property
    def threshold(self) -> int:
        """Contexts above it should take the flash path."""
        return fit(self.contexts, self.direct, self.flash)

    def report(self) -> dict[str, Any]:
        return {**attrs.asdict(self), KEY: self.threshold}


def fit(contexts: Sequence[int], direct: Sequence[float], flash: Sequence[float]) -> int:
    """The context up to which `direct` is the better choice; 0: never."""
    ratios = [math.log(d / f) for d, f in zip(direct, flash, strict=True)]
    regrets = [sum(ratios[:cut]) for cut in range(len(ratios) + 1)]
    cut = min(range(len(regrets)), key=regrets.__getitem__)
    if cut in (0, len(contexts)):
        return 0 if cut == 0 else contexts[-1]
    low, high = ratios[cut - 1], ratios[cut]
    share = 0.5 if high <= low else min(1.0, max(0.0, -low / (high - low)))
    bottom, top = math.log(contexts[cut - 1]), math.log(contexts[cut])
    return round(math.exp(bottom + share * (top - bottom)))


def contexts_up_to(most: int) -> list[int]:
    """Two lengths per octave, from 64 tokens."""
    found, at = [], 64.0
    while at < most:
        found.append(int(at))
        at *= 2**0.5
    return [*found, most]


def measure_flash(
    engine: Engine, *, rows: int, repeats: int, progress: Callable[[str], None]
) -> FlashFit:
    """Time decode steps of `rows` sequences on both paths at growing contexts."""
    runner = engine.runner
    backend = runner.backend
    if not isinstance(backend, Adjustable) or KEY not in backend.adjustable():
        raise ConfigError(
            f"`{backend.capabilities().name}` has one attention path, so nothing to fit",
            code="HRT-3412",
            fix="use a backend with `flash_threshold` among its options",
        )
    before = backend.adjustable()[KEY]
    room = runner.kv.num_blocks * runner.kv.layout.spec.block_size // rows
    contexts = contexts_up_to(min(room, engine.info.context_length))
    times: dict[str, list[float]] = {"direct": [], "flash": []}
    for context in contexts:
        step = rehearse(StepKind(parts=(Part(context=context - 1),) * rows), runner.kv)
        found: dict[str, list[float]] = {"direct": [], "flash": []}
        for _ in range(repeats + 1):
            for path, threshold in (("direct", NEVER), ("flash", 0)):
                backend.adjust(KEY, str(threshold))
                began = time.perf_counter()
                runner.step(step.batch, step.shape)
                found[path].append(time.perf_counter() - began)
        for path, medians in times.items():
            medians.append(statistics.median(found[path][1:]))
        direct, flash = 1e3 * times["direct"][-1], 1e3 * times["flash"][-1]
        progress(f"context {context:>7}: direct {direct:.3f} ms, flash {flash:.3f} ms")
    backend.adjust(KEY, before)
    return FlashFit(
        contexts=tuple(contexts), direct=tuple(times["direct"]), flash=tuple(times["flash"])
    )
