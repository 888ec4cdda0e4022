"""Measuring launch shapes on the device at hand.

Ops are called again as they were met (same weights, same rows) under other launches: from the
launch in force, one parameter at a time is halved or doubled as long as that is faster. What does
not compile, or gives other numbers, is no candidate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from halogen_triton.launch import Rule, Tuning

RECORDED = ("linear", "logits", "mlp", "moe", "attention")
GAIN = 0.02
"""Share of the time that a change must save: less is noise."""
LIMITS = {
    "block_m": (16, 256),
    "block_n": (1, 256),
    "block_k": (16, 4096),
    "warps": (1, 16),
    "stages": (1, 5),
    "waves_per_eu": (1, 8),
}
TOLERANCE = 2e-2

Timer = Callable[[Callable[[], object]], float]


@attrs.frozen(eq=False)
class Met:
    """A call of an op, to be made again."""

    op: str
    call: Callable[[], Tensor]


@attrs.frozen(kw_only=True, eq=False)
class Recording(Tuning):
    """A table that remembers what it was asked."""

    asked: dict[tuple[str, tuple[tuple[str, int], ...]], None] = attrs.field(factory=dict)

    def rule(self, kernel: str, **shape: int) -> Rule:
        self.asked[kernel, tuple(sorted(shape.items()))] = None
        return super().rule(kernel, **shape)


@contextlib.contextmanager
def met(ops: Any) -> Iterator[list[Met]]:
    """While inside, every new class of call is recorded in the list."""
    found: list[Met] = []
    seen: set[Any] = set()

    def watch(name: str, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **named: Any) -> Tensor:
            key = (name, *map(_class_of, args), *(_class_of(v) for v in named.values()))
            if key not in seen:
                seen.add(key)
                found.append(Met(name, lambda: method(*args, **named)))
            return method(*args, **named)

        return call

    for name in RECORDED:
        setattr(ops, name, watch(name, getattr(ops, name)))
    try:
        yield found
    finally:
        for name in RECORDED:
            delattr(ops, name)


def _class_of(value: Any) -> Any:
    """What makes one call's launch like another's."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    shape, form = getattr(value, "shape", None), getattr(value, "format_id", None)
    if form is not None:
        return form, shape
    host = getattr(value, "host", None)
    if host is not None:
        return host.num_tokens, host.num_sequences, int(host.max_seq_len)
    return value if isinstance(value, (int, float, str)) else type(value)


def measure(
    ops: Any, calls: list[Met], timer: Timer, progress: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Rules, in the form of a table, that beat those in force by more than `GAIN`."""
    before: Tuning = ops.tuning
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for one in calls:
            ops.tuning = asked = _recording(before)
            ops.settled(one.call())
            for kernel, shape in asked.asked:
                rule = _improve(ops, one, before, kernel, dict(shape), timer)
                if rule is not None:
                    found.setdefault(kernel, []).append(rule)
                    progress(f"{kernel} {dict(shape)}: {rule['launch']}")
    finally:
        ops.tuning = before
    return found


def _recording(tuning: Tuning) -> Recording:
    return Recording(**{f.name: getattr(tuning, f.name) for f in attrs.fields(Tuning)})


def _improve(
    ops: Any, one: Met, table: Tuning, kernel: str, shape: dict[str, int], timer: Timer
) -> dict[str, Any] | None:
    """The best rule near the one in force; None: that one."""
    best = start = table.rule(kernel, **shape)
    if start.library:
        return None

    def call() -> Tensor:
        made: Tensor = ops.settled(one.call())
        return made

    def seconds(rule: Rule) -> float:
        own = attrs.evolve(rule, bounds=shape, least=shape)
        ops.tuning = attrs.evolve(table, rules={**table.rules, kernel: (own,)})
        try:
            if not torch.allclose(call(), want, rtol=TOLERANCE, atol=TOLERANCE):
                return float("inf")
            return timer(call)
        except Exception:  # too many registers, too much shared memory, a tile that cannot be
            return float("inf")

    ops.tuning = table
    want = call().clone()
    least = seconds(start)
    moved = True
    while moved:
        moved = False
        for candidate in _neighbours(best):
            time = seconds(candidate)
            if time < least * (1 - GAIN):
                best, least, moved = candidate, time, True
                break
    return None if best is start else _as_table(best, shape)


def _neighbours(rule: Rule) -> Iterator[Rule]:
    for name, (low, high) in LIMITS.items():
        value = getattr(rule.launch, name)
        for other in (value // 2, value * 2):
            if value and low <= other <= high:
                yield attrs.evolve(rule, launch=attrs.evolve(rule.launch, **{name: other}))
    for programs in (rule.programs // 2, rule.programs * 2):
        if programs:
            yield attrs.evolve(rule, programs=programs)


def _as_table(rule: Rule, shape: Mapping[str, int]) -> dict[str, Any]:
    launch = {k: v for k, v in attrs.asdict(rule.launch).items() if k != "pdl"}
    return attrs.asdict(rule) | {"launch": launch, "bounds": dict(shape), "least": dict(shape)}
