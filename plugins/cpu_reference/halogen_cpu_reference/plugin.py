"""Registration of `cpu_reference`; imports nothing heavy."""

from __future__ import annotations

from halogen_core.spi import BackendSpec, DeviceInfo, ProbeContext, ProbeResult, hookimpl

NAME = "cpu_reference"


@hookimpl
def halogen_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name=NAME,
            aliases=("cpu",),
            priority=10,
            factory="halogen_cpu_reference.backend:create",
        )
    ]


@hookimpl
def halogen_probe(name: str, context: ProbeContext) -> ProbeResult | None:
    if name != NAME:
        return None
    return ProbeResult(score=10, devices=(DeviceInfo(id=f"{NAME}:0", name="CPU, plain torch"),))
