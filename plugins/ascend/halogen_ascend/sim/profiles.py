"""Device profiles and what may be asked of them: cores, masks, pool sizes."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import attrs

from halogen_core.spi import ConfigError

CUBE = 16
"""A cube multiplies 16x16 by 16x16 half-precision fractals, 4096 multiply-adds per cycle."""


@attrs.frozen(kw_only=True)
class Profile:
    """One part. Bytes, bytes per second, hertz, seconds."""

    name: str
    cube_cores: int
    vector_cores: int
    clock: float
    hbm_bytes: int
    hbm_reserved: int
    hbm_bandwidth: float
    l2_bytes: int
    l2_read_per_cycle: int
    vector_bytes_per_cycle: int
    alignment: int
    banks: int
    dma: float
    """HBM bytes per second that one core's engines can pull."""
    task: float
    """Fixed time of one micro-task: scalar set-up and pipeline fill."""
    launch: float
    hypothetical: bool

    @property
    def usable_bytes(self) -> int:
        """HBM that allocations can really get."""
        return self.hbm_bytes - self.hbm_reserved

    def macs_per_second(self, itemsize: int) -> float:
        """Multiply-adds per second of one cube: int8 twice, float32 a quarter of float16."""
        factor = {1: 2.0, 2: 1.0, 4: 0.25}[itemsize]
        return CUBE**3 * self.clock * factor

    def ridge_tokens(self, clock_share: float = 1.0) -> int:
        """Tokens of a step whose arithmetic takes as long as reading 16-bit weights, as a power of
        two: the roofline's ridge (Williams et al., 2009). More make it longer, not more efficient.
        """
        peak = self.macs_per_second(2) * self.cube_cores * clock_share
        ridge = peak * 2 / self.hbm_bandwidth
        return 1 << max(CUBE.bit_length() - 1, math.ceil(math.log2(ridge)))


@cache
def profiles() -> Mapping[str, Profile]:
    """Every part by name."""
    text = files("halogen_ascend.sim").joinpath("profiles.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    defaults = tables.pop("defaults")
    return {name: Profile(name=name, **{**defaults, **table}) for name, table in tables.items()}


def profile(name: str) -> Profile:
    """The part called `name`; raises `ConfigError` (HRT-7102) with the list."""
    if found := profiles().get(name):
        return found
    raise ConfigError(
        f"simulated part `{name}` is unknown; known: {', '.join(profiles())}",
        code="HRT-7102",
        fix="write --device ascend:sim:910B2",
    )


def restrict(part: Profile, *, core_num: int | None, mask: int | None) -> Profile:
    """`part` with fewer cores: a count or a bit mask of cubes; each cube brings two vector cores.

    Raises `ConfigError` (HRT-7103) for cores that do not exist: on hardware that is a hang.
    """
    if mask is not None and core_num is not None:
        raise ConfigError(
            "`core_affinity_mask` and `core_num` contradict each other", fix="set one of them"
        )
    if mask is not None:
        if mask <= 0 or mask >> part.cube_cores:
            raise ConfigError(
                f"`core_affinity_mask` {mask:#x} names cores beyond the {part.cube_cores} of "
                f"`{part.name}`; largest mask: {(1 << part.cube_cores) - 1:#x}",
                code="HRT-7103",
                fix="mask only cores that the part has",
            )
        core_num = mask.bit_count()
    if core_num is None:
        return part
    if not 1 <= core_num <= part.cube_cores:
        raise ConfigError(
            f"`core_num` {core_num} is not within 1 to {part.cube_cores} of `{part.name}`",
            code="HRT-7103",
            fix="leave it unset to use every core",
        )
    vector = part.vector_cores // part.cube_cores * core_num
    return attrs.evolve(part, cube_cores=core_num, vector_cores=vector)
