"""Registration of `cuda`; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from halogen_core.spi import (
    BackendSpec,
    DoctorContext,
    Finding,
    OpImplementation,
    ProbeContext,
    ProbeResult,
    hookimpl,
)

NAME = "cuda"


@hookimpl
def halogen_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name=NAME,
            aliases=("nvidia",),
            priority=60,
            factory="halogen_cuda.backend:create",
            ahead_factory="halogen_cuda.backend:create_ahead",
        )
    ]


@hookimpl
def halogen_probe(name: str, context: ProbeContext) -> ProbeResult | None:
    if name != NAME:
        return None
    from halogen_cuda.probe import probe

    return probe(context)


@hookimpl
def halogen_doctor_checks(context: DoctorContext) -> Iterable[Finding]:
    from halogen_cuda.doctor import findings

    return list(findings(context))


@hookimpl
def halogen_ops(backend: str) -> Iterable[OpImplementation]:
    if backend != NAME:
        return []
    from halogen_triton.flash_attn_pack import offers

    return offers(NAME)
