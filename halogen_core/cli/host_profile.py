"""The host as a device profile: its reading speed, measured now; its peak is not known."""

from __future__ import annotations

import time

from halogen_core.cli.profiles import Profile

BYTES = 256 << 20
REPEATS = 5


def host_profile() -> Profile:
    """A profile whose best bandwidth is the fastest of a few passes over 256 MiB."""
    bandwidth = read_bandwidth()
    return Profile(
        name="this host, measured",
        backend="",
        device="host",
        source=f"fastest of {REPEATS} passes over {BYTES >> 20} MiB",
        free=0,
        reserve=0,
        bandwidth={"best": bandwidth},
        compute={},
        weight_formats={},
        kv_dtypes=(),
        kv_block_sizes=(),
        head_dim_max=0,
        fallback_ops={},
    )


def read_bandwidth(size: int = BYTES) -> float:
    """Bytes per second of reading a large array once, on torch's threads."""
    import torch

    array = torch.ones(size // 4, dtype=torch.float32)
    best = 0.0
    for _ in range(REPEATS):
        began = time.perf_counter()
        array.sum()
        best = max(best, size / (time.perf_counter() - began))
    return best
