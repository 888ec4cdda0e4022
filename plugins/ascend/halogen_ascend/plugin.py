"""Registration of `ascend`; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from halogen_core.spi import (
    BackendSpec,
    DoctorContext,
    Finding,
    FormatSpec,
    ProbeContext,
    ProbeResult,
    hookimpl,
)

if TYPE_CHECKING:
    import click

NAME = "ascend"


@hookimpl
def halogen_backends() -> list[BackendSpec]:
    return [BackendSpec(name=NAME, priority=60, factory="halogen_ascend.backend:create")]


@hookimpl
def halogen_probe(name: str, context: ProbeContext) -> ProbeResult | None:
    if name != NAME:
        return None
    from halogen_ascend.probe import probe

    return probe(context)


@hookimpl
def halogen_weight_formats() -> list[FormatSpec]:
    return [
        FormatSpec(
            name="W8A8",
            factory="halogen_ascend.weights.formats:W8A8",
            description="int8 with a scale per output channel; activations int8 per token",
        ),
        FormatSpec(
            name="W8A16",
            factory="halogen_ascend.weights.formats:W8A16",
            description="int8 with a scale per output channel; activations stay 16-bit",
        ),
    ]


@hookimpl
def halogen_doctor_checks(context: DoctorContext) -> Iterable[Finding]:
    from halogen_ascend.doctor import checks

    return checks(context)


@hookimpl
def halogen_cli_commands(group: click.Group) -> None:
    from halogen_ascend.cli import add_commands

    add_commands(group)
