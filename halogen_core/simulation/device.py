"""A device as a cost model: what a step of a given shape takes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import attrs

from halogen_core.errors import ConfigError
from halogen_core.spi import Cost, StepShape

PROFILE_CODE = "HRT-4110"


@attrs.frozen(kw_only=True)
class DeviceProfile:
    """A roofline of one device with one model. Seconds, bytes, tokens.

    A step reads the weights once and each sequence's keys and values, and computes its tokens:
    `overhead_s + max(weight_bytes / bandwidth, tokens / compute) + kv_bytes / bandwidth`.
    """

    name: str
    weight_bytes: float
    """Read by every step."""
    kv_bytes_per_token: float
    bandwidth: float
    """Bytes per second that are really reached."""
    compute: float
    """Prompt tokens per second, when nothing but computing limits."""
    overhead_s: float = 0.001
    """Of a step, whatever is in it."""
    block_copy_s: float = 2e-5
    """Moving one block to or from host memory."""
    jitter: float = 0.0
    """Relative spread of a step's time."""

    def __attrs_post_init__(self) -> None:
        for name in ("weight_bytes", "kv_bytes_per_token", "bandwidth", "compute"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"device profile `{self.name}`: `{name}` is {getattr(self, name)}; it must be"
                    " above 0",
                    code=PROFILE_CODE,
                )

    def seconds(self, shape: StepShape) -> float:
        """Time of a step."""
        tokens = shape.prefill_tokens + shape.decode_sequences
        work = max(self.weight_bytes / self.bandwidth, tokens / self.compute)
        return self.overhead_s + work + shape.kv_tokens * self.kv_bytes_per_token / self.bandwidth

    def cost(self, shape: StepShape) -> Cost:
        """As a backend would predict it."""
        seconds = self.seconds(shape)
        return Cost(p50=seconds, p95=seconds * (1 + 2 * self.jitter))


PROFILES = {
    profile.name: profile
    for profile in (
        DeviceProfile(
            name="unified-256GBps-8B-q4",
            weight_bytes=4.7e9,
            kv_bytes_per_token=131_072,
            bandwidth=212e9,
            compute=1_000,
        ),
        DeviceProfile(
            name="unified-256GBps-32B-q4",
            weight_bytes=19.8e9,
            kv_bytes_per_token=262_144,
            bandwidth=212e9,
            compute=250,
        ),
        DeviceProfile(
            name="accelerator-3TBps-8B-f16",
            weight_bytes=16e9,
            kv_bytes_per_token=131_072,
            bandwidth=2.6e12,
            compute=25_000,
        ),
    )
}
"""Rooflines from data-sheet bandwidth (83 % of it) and assumed prompt speeds: estimates to start
from, not measurements. Save your own from `halogen bench`."""


def load_profile(name: str) -> DeviceProfile:
    """A built-in profile by name, or one from a TOML file."""
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"device profile `{name}` is neither a file nor one of {', '.join(PROFILES)}",
            code=PROFILE_CODE,
        )
    try:
        fields: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return DeviceProfile(**{"name": path.stem, **fields})
    except (tomllib.TOMLDecodeError, TypeError) as exc:
        known = ", ".join(f.name for f in attrs.fields(DeviceProfile))
        raise ConfigError(
            f"device profile `{name}` does not read: {exc}; its keys are {known}",
            code=PROFILE_CODE,
        ) from exc
