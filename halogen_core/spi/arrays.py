"""Device and host arrays, as types."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Array = TypeVar("Array")
"""A device array: a `torch.Tensor` or any opaque handle. Core code is generic over it, so the
type checker proves that the core only passes arrays between ops and never computes on one."""

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
