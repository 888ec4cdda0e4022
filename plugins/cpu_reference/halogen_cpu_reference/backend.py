"""`create`: the reference backend, plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from numpy.typing import NDArray
from torch import Tensor

from halogen_core.spi import (
    BackendOptions,
    ConfigError,
    PackedWeight,
    QuantTensor,
    TorchBackend,
    TorchOps,
    WeightRole,
)
from halogen_cpu_reference.linear import CpuInvariantOps, CpuOps, can_prepack, prepack
from halogen_cpu_reference.plugin import NAME


class CpuReference(TorchBackend):
    """Plain torch is what it is for, so its ops count as native."""

    torch_is_native: ClassVar[bool] = True
    ops_class: ClassVar[type[TorchOps]] = CpuOps
    invariant_ops_class: ClassVar[type[TorchOps] | None] = CpuInvariantOps

    def pack(self, parts: Sequence[QuantTensor], role: WeightRole) -> PackedWeight[Tensor]:
        weight = super().pack(parts, role)
        if role is not WeightRole.LINEAR or not can_prepack(weight.payload):
            return weight
        return attrs.evolve(weight, payload=prepack(weight.payload), format_id="torch/onednn/f32")

    def unpack(self, weight: PackedWeight[Tensor]) -> NDArray[Any]:
        if isinstance(weight.payload, Tensor) and weight.payload.is_mkldnn:
            return self.download(weight.payload.to_dense())
        return super().unpack(weight)


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
