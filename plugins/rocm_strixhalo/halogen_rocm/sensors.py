"""What the GPU's sensors say now, and whether it seems to throttle."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from halogen_rocm.platform import Gpu, text

BUSY = 95.0
FALL = 0.85


@attrs.frozen(kw_only=True)
class Sensors:
    """A reading; None: this machine has no such sensor."""

    celsius: float | None = None
    watts: float | None = None
    busy: float | None = None
    """Percent."""
    megahertz: float | None = None

    @property
    def shown(self) -> str:
        """For people; empty where nothing can be read."""
        parts = (
            (self.celsius, "{:.0f} °C"),
            (self.watts, "{:.0f} W"),
            (self.busy, "{:.0f} % busy"),
            (self.megahertz, "{:.0f} MHz"),
        )
        return ", ".join(form.format(value) for value, form in parts if value is not None)

    def gauges(self) -> dict[str, float]:
        """By metric name, in base units."""
        named = {
            "gpu_celsius": self.celsius,
            "gpu_watts": self.watts,
            "gpu_busy_ratio": None if self.busy is None else self.busy / 100,
            "gpu_clock_hertz": None if self.megahertz is None else self.megahertz * 1e6,
        }
        return {name: value for name, value in named.items() if value is not None}


def read_sensors(gpu: Gpu) -> Sensors:
    """One reading below the GPU's sysfs folder."""
    hwmon = next(iter(sorted(gpu.path.glob("hwmon/hwmon*"))), gpu.path)
    power = _number(hwmon / "power1_average") or _number(hwmon / "power1_input")
    celsius = _number(hwmon / "temp1_input")
    current = re.search(r"(\d+)Mhz \*", text(gpu.path / "pp_dpm_sclk"))
    return Sensors(
        celsius=None if celsius is None else celsius / 1e3,
        watts=None if power is None else power / 1e6,
        busy=_number(gpu.path / "gpu_busy_percent"),
        megahertz=float(current.group(1)) if current else None,
    )


def throttle_suspected(best: Sensors, now: Sensors) -> bool:
    """Whether clock and power fell together while the GPU stayed busy."""
    readings = (best.busy, now.busy, best.watts, now.watts, best.megahertz, now.megahertz)
    if any(value is None for value in readings):
        return False
    busy0, busy, watts0, watts, clock0, clock = (float(value or 0) for value in readings)
    return min(busy0, busy) >= BUSY and watts < FALL * watts0 and clock < FALL * clock0


def _number(path: Path) -> float | None:
    value = text(path).strip()
    return float(value) if value.lstrip("-").isdigit() else None
