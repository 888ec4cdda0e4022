"""Launch shapes as data: tiles and compiler options of a kernel."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen(kw_only=True)
class Launch:
    """Tile sizes (0: not used) and compiler options."""

    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    warps: int = 4
    stages: int = 1
    waves_per_eu: int = 0
    """AMD only: registers are limited so that so many waves fit a SIMD; 0: no limit."""

    @property
    def options(self) -> Mapping[str, int]:
        """Keyword arguments of a Triton launch."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if self.waves_per_eu:
            options["waves_per_eu"] = self.waves_per_eu
        return options
