"""Queue policies by name: ours and those of plugins (`halogen_scheduling_policies`)."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from halogen_core.errors import ConfigError
from halogen_core.scheduler.policy import QueuePolicy
from halogen_core.spi import PolicySpec

SCHEDULING_POLICIES: tuple[PolicySpec, ...] = (
    PolicySpec(
        name="fcfs",
        factory="halogen_core.scheduler.policy:FCFS",
        description="first come, first served",
    ),
    PolicySpec(
        name="priority",
        factory="halogen_core.scheduler.policy:Priority",
        description="higher priority first; one level is a head start of a second",
    ),
    PolicySpec(
        name="shortest",
        factory="halogen_core.scheduler.policy:ShortestRemaining",
        description="least work first, nothing overtaken for more than five seconds",
    ),
    PolicySpec(
        name="fair",
        factory="halogen_core.scheduler.policy:FairShare",
        description="sessions take turns in proportion to tokens",
    ),
)

PRIORITY_LABELS = {"low": -1, "normal": 0, "high": 1, "urgent": 3}
"""Labels that requests may use instead of numbers (C7)."""


def scheduling_policy(name: str, contributed: Iterable[PolicySpec] = ()) -> QueuePolicy:
    """A new policy of this name; raises `ConfigError` that lists the names there are."""
    specs = {spec.name: spec for spec in (*SCHEDULING_POLICIES, *contributed)}
    if name not in specs:
        raise ConfigError(
            f"`scheduling_policy` is `{name}`; there are {', '.join(sorted(specs))}",
            code="HRT-4106",
            fix="set --scheduling-policy to one of these",
        )
    module, _, attribute = specs[name].factory.partition(":")
    policy: QueuePolicy = getattr(import_module(module), attribute)()
    return policy


def priority_of(label: str | int) -> int:
    """A priority by number or label; raises `ConfigError` for an unknown label."""
    if isinstance(label, int):
        return label
    if label not in PRIORITY_LABELS:
        raise ConfigError(
            f"priority is `{label}`; allowed are numbers and {', '.join(PRIORITY_LABELS)}",
            code="HRT-4107",
        )
    return PRIORITY_LABELS[label]
