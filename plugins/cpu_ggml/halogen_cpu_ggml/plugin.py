"""Registration of `cpu_ggml`; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from halogen_core.spi import (
    BackendSpec,
    BackendUnavailable,
    DeviceInfo,
    DoctorContext,
    Finding,
    ProbeContext,
    ProbeResult,
    Reason,
    Severity,
    hookimpl,
)

NAME = "cpu_ggml"


@hookimpl
def halogen_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name=NAME,
            aliases=("ggml",),
            priority=20,
            factory="halogen_cpu_ggml.backend:create",
        )
    ]


@hookimpl
def halogen_probe(name: str, context: ProbeContext) -> ProbeResult | None:
    if name != NAME:
        return None
    from halogen_cpu_ggml.selftest import inspect_machine

    try:
        report = inspect_machine()
    except BackendUnavailable as exc:
        return ProbeResult(score=0, reasons=(Reason(code=exc.code, text=str(exc)),))
    device = DeviceInfo(id=f"{NAME}:0", name=report.summary, driver=f"ggml {report.version}")
    return ProbeResult(score=50, devices=(device,), reasons=report.reasons)


@hookimpl
def halogen_doctor_checks(context: DoctorContext) -> Iterable[Finding]:
    if not context.live:
        return []
    from halogen_cpu_ggml.selftest import inspect_machine

    try:
        report = inspect_machine()
    except BackendUnavailable as exc:
        finding = Finding(
            code=exc.code, severity=Severity.WARNING, text=str(exc), fix=exc.fix or ""
        )
        return [finding]
    fine = Finding(code="cpu_ggml", severity=Severity.OK, text=report.summary)
    lacks = [
        Finding(code=r.code, severity=Severity.WARNING, text=r.text, fix=r.hint)
        for r in report.reasons
    ]
    return [fine, *lacks]
