"""The hooks a plugin may implement (project `halogen`, entry-point group `halogen.plugins`).

Hooks return records and have no side effects; they run at start-up and on commands, never per step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

from halogen_core.spi.records import (
    BackendSpec,
    ConformanceExtras,
    DoctorContext,
    Finding,
    FormatSpec,
    OpImplementation,
    PolicySpec,
    ProbeContext,
    ProbeResult,
)

if TYPE_CHECKING:
    import click
    from fastapi import APIRouter

PROJECT = "halogen"
ENTRY_POINT_GROUP = "halogen.plugins"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def halogen_backends() -> Iterable[BackendSpec]:  # type: ignore[empty-body]
    """The backends this plugin offers."""


@hookspec
def halogen_probe(name: str, context: ProbeContext) -> ProbeResult | None:
    """Look for the hardware of backend `name` (None: not ours); runs in a subprocess, timed."""


@hookspec
def halogen_ops(backend: str) -> Iterable[OpImplementation]:  # type: ignore[empty-body]
    """Op implementations for somebody else's backend (a kernel pack)."""


@hookspec
def halogen_weight_formats() -> Iterable[FormatSpec]:  # type: ignore[empty-body]
    """Weight formats beyond `FORMATS`."""


@hookspec
def halogen_model_loaders() -> Iterable[FormatSpec]:  # type: ignore[empty-body]
    """Readers of further model file formats."""


@hookspec
def halogen_model_architectures() -> Iterable[FormatSpec]:  # type: ignore[empty-body]
    """Further architectures over the shared decoder."""


@hookspec
def halogen_scheduling_policies() -> Iterable[PolicySpec]:  # type: ignore[empty-body]
    """Orders of the waiting queue."""


@hookspec
def halogen_eviction_policies() -> Iterable[PolicySpec]:  # type: ignore[empty-body]
    """Choices of which cached block goes first."""


@hookspec
def halogen_kv_tiers() -> Iterable[PolicySpec]:  # type: ignore[empty-body]
    """Places for KV blocks beyond device, host and disk."""


@hookspec
def halogen_doctor_checks(context: DoctorContext) -> Iterable[Finding]:  # type: ignore[empty-body]
    """Findings about this machine."""


@hookspec
def halogen_cli_commands(group: click.Group) -> None:
    """Add commands to `halogen`."""


@hookspec
def halogen_server_routes(router: APIRouter) -> None:
    """Add routes to the server."""


@hookspec
def halogen_conformance() -> Iterable[ConformanceExtras]:  # type: ignore[empty-body]
    """Extra conformance cases, declared gaps, tighter tolerances."""
