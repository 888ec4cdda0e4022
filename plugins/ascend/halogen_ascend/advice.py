"""What the scheduler is told: limits, and a step's time from the part's figures and the model's.

Device time is simulated; what the core measures is not. `observe` learns the ratio between the
two, so that predictions are in the clock of whoever observes. Both follow the part's heat.
"""

from __future__ import annotations

import math
from typing import Any

import attrs

from halogen_ascend.heat import Heat
from halogen_ascend.sim.profiles import Profile
from halogen_core.spi import Cost, KVLayout, Limits, PackedWeight, StepShape, WeightRole

SPREAD = 1.3
"""p95 over p50 until enough steps were seen."""
_KEEP = 0.9
OPS_OF_A_LAYER, OPS_OF_A_STEP = 5, 4
"""Launches beside the products: two norms, KV store, attention and residual; embedding, rows, last
norm and sampling."""
WAVES = 2
"""Tasks one after the other on a core, in a launch of middling size."""


QKV = 3
"""Parts of a packed matrix that projects to queries, keys and values."""


@attrs.define(kw_only=True)
class Advice:
    """Sums over the packed model, and the calibration."""

    part: Profile = attrs.field(kw_only=False)
    heat: Heat = attrs.field(kw_only=False)
    launch_s: float
    weight_bytes: int = 0
    macs_per_token: int = 0
    macs_per_pair: int = 0
    """Of attention, for a token and one that it attends to, over all layers."""
    matrices: int = 0
    kv_bytes_per_token: float = 0.0
    layers: int = 0
    _log_ratio: float = 0.0
    _log_error: float = math.log(SPREAD) / 1.645
    _seen: int = 0

    def add_weight(self, packed: PackedWeight[Any]) -> None:
        """Count a packed matrix; an embedding table is not multiplied by."""
        if packed.role in (WeightRole.LINEAR, WeightRole.EXPERTS):
            self.weight_bytes += packed.nbytes
            self.macs_per_token += math.prod(packed.shape)
            self.matrices += 1
            if len(packed.parts) == QKV:
                # scores and values, each as wide as all query heads together
                self.macs_per_pair += 2 * packed.parts[0]

    def set_kv(self, layout: KVLayout) -> None:
        """Learn what one cached token costs to read."""
        self.kv_bytes_per_token = layout.bytes_per_block / layout.spec.block_size
        self.layers = layout.spec.num_layers

    def limits(self, buckets: tuple[int, ...]) -> Limits:
        """A throttled part takes no step longer than the one that is still bound by memory."""
        most = self.part.ridge_tokens(self.heat.clock_share) if self.heat.throttled else None
        return Limits(max_tokens=most, token_buckets=buckets)

    def device_seconds(self, shape: StepShape) -> float:
        """Simulated time of a step: launches, then the larger of bytes and arithmetic."""
        tokens = shape.prefill_tokens + shape.decode_sequences
        if not tokens:
            return 0.0
        launches = self.matrices + OPS_OF_A_LAYER * self.layers + OPS_OF_A_STEP
        captured = not shape.prefill_tokens
        fixed = self.launch_s * (1 if captured else launches)
        fixed += WAVES * self.part.task * launches
        moved = self.weight_bytes + shape.kv_tokens * self.kv_bytes_per_token
        macs = self.macs_per_token * (-(-tokens // 16) * 16)
        macs += self.macs_per_pair * shape.prefill_pairs
        peak = self.part.macs_per_second(2) * self.part.cube_cores * self.heat.clock_share
        return fixed + max(moved / self.part.hbm_bandwidth, macs / peak)

    def cost(self, shape: StepShape) -> Cost | None:
        """Calibrated prediction; None before a model is packed."""
        if not self.weight_bytes:
            return None
        middle = self.device_seconds(shape) * math.exp(self._log_ratio)
        return Cost(p50=middle, p95=middle * math.exp(1.645 * self._log_error))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Move the ratio towards what was measured; steps of nothing teach nothing."""
        predicted = self.device_seconds(shape)
        if not self.weight_bytes or predicted <= 0 or seconds <= 0:
            return
        ratio = math.log(seconds / predicted)
        self._log_error = _KEEP * self._log_error + (1 - _KEEP) * abs(ratio - self._log_ratio)
        # the first step sets the scale: host and simulated clocks differ by orders of magnitude
        keep = _KEEP if self._seen else 0.0
        if not self._seen:
            self._log_error = math.log(SPREAD) / 1.645
        self._log_ratio = keep * self._log_ratio + (1 - keep) * ratio
        self._seen += 1
