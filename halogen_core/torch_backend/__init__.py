"""Every op in plain torch: the default implementation of the whole seam."""

from halogen_core.torch_backend.backend import TorchBackend
from halogen_core.torch_backend.dequant import dequantize
from halogen_core.torch_backend.host_backend import HostFallbackBackend
from halogen_core.torch_backend.host_ops import HostFallbackOps
from halogen_core.torch_backend.invariant import InvariantTorchOps
from halogen_core.torch_backend.ops import TorchOps
from halogen_core.torch_backend.options import DTYPES

__all__ = [
    "DTYPES",
    "HostFallbackBackend",
    "HostFallbackOps",
    "InvariantTorchOps",
    "TorchBackend",
    "TorchOps",
    "dequantize",
]
