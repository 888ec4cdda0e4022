"""Registration of `rocm_strixhalo`; imports nothing heavy."""

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

NAME = "rocm_strixhalo"


@hookimpl
def halogen_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name=NAME,
            aliases=("rocm",),
            priority=50,
            factory="halogen_rocm.backend:create",
            ahead_factory="halogen_rocm.backend:create_ahead",
        )
    ]


@hookimpl
def halogen_probe(name: str, context: ProbeContext) -> ProbeResult | None:
    if name != NAME:
        return None
    from halogen_rocm.probe import probe

    return probe()


@hookimpl
def halogen_doctor_checks(context: DoctorContext) -> Iterable[Finding]:
    from halogen_rocm.doctor import findings

    return list(findings(context))


@hookimpl
def halogen_ops(backend: str) -> Iterable[OpImplementation]:
    if backend != NAME:
        return []
    from halogen_triton.flash_attn_pack import offers

    return offers(NAME)
