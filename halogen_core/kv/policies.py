"""Eviction policies by name: ours and those of plugins (`halogen_eviction_policies`)."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from halogen_core.errors import ConfigError
from halogen_core.kv.eviction import EvictionPolicy
from halogen_core.spi import PolicySpec

EVICTION_POLICIES: tuple[PolicySpec, ...] = (
    PolicySpec(
        name="lru",
        factory="halogen_core.kv.eviction:LRU",
        description="least recently used first",
    ),
    PolicySpec(
        name="session_priority+lru",
        factory="halogen_core.kv.eviction:SessionPriority",
        description="sessions of priority 1 and above pinned within a quota, then LRU",
    ),
    PolicySpec(
        name="cheapest_loss",
        factory="halogen_core.kv.cheapest_loss:CheapestLoss",
        description="lowest recompute cost x chance of reuse first; survives agents' side turns",
    ),
)


def eviction_policy(name: str, contributed: Iterable[PolicySpec] = ()) -> EvictionPolicy:
    """A new policy of this name; raises `ConfigError` that lists the names there are."""
    specs = {spec.name: spec for spec in (*EVICTION_POLICIES, *contributed)}
    if name not in specs:
        raise ConfigError(
            f"`eviction_policy` is `{name}`; there are {', '.join(sorted(specs))}",
            code="HRT-3302",
            fix="set --eviction-policy to one of these",
        )
    module, _, attribute = specs[name].factory.partition(":")
    policy: EvictionPolicy = getattr(import_module(module), attribute)()
    return policy
