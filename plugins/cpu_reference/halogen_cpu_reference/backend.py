"""`create`: the reference backend, plain torch on the CPU."""

from __future__ import annotations

from typing import ClassVar

import torch

from halogen_core.spi import BackendOptions, ConfigError, TorchBackend
from halogen_cpu_reference.plugin import NAME


class CpuReference(TorchBackend):
    """Plain torch is what it is for, so its ops count as native."""

    torch_is_native: ClassVar[bool] = True


def create(options: BackendOptions) -> CpuReference:
    """Open it; raises `ConfigError` for a device or option it does not know."""
    _check_device(options.device)
    threads = options.threads or torch.get_num_threads()
    return CpuReference(
        options, device="cpu", name=NAME, description=f"{NAME}:0 (CPU, {threads} threads)"
    )


def _check_device(device: str | None) -> None:
    allowed = (None, NAME, "cpu", f"{NAME}:0", "cpu:0")
    if device not in allowed:
        raise ConfigError(
            f"device is `{device}`; `{NAME}` has only `{NAME}:0`",
            code="HRT-3107",
            fix="leave --device out",
        )
