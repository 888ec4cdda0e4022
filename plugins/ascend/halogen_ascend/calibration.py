"""HBM bandwidth against a baseline of the same machine: what a card did when it was well.

A baseline is per host and device, stored by the first run. Simulated figures are of the simulated
clock and are kept apart by their device name.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from halogen_ascend.sim.device import SimDevice
from halogen_ascend.sim.tasks import Program
from halogen_ascend.sim.vector import by_rows
from halogen_core.spi import ConfigError, Finding, Severity

ENOUGH = 0.9
"""Below this share of the baseline something is wrong: heat, a lost bank, a neighbour."""
SIZE = 256 * 2**20
_ROWS = 4096
REPEATS = 5


def simulated_bandwidth(device: SimDevice, nbytes: int = SIZE) -> float:
    """Bytes per simulated second of a copy of `nbytes`, read and written once."""
    row = 2 * nbytes // _ROWS

    def build(_: object) -> Program:
        return by_rows("bandwidth", _ROWS, 0, lambda a, b: None, part=device.part, hbm_bytes=row)

    device.synchronize()
    before = device.now
    device.submit("bandwidth", build)
    device.synchronize()
    return row * _ROWS / (device.now - before)


def copied_bandwidth(
    device: torch.device,
    synchronize: Callable[[], None],
    *,
    nbytes: int = SIZE,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Bytes per second of the device's own copy, read and written once; best of a few."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = math.inf
    for _ in range(REPEATS + 1):  # the first warms up; it is seldom the best
        synchronize()
        start = clock()
        target.copy_(source)
        synchronize()
        best = min(best, clock() - start)
    return 2 * nbytes / best


def compare(path: Path, device: str, rate: float, *, reset: bool = False) -> Finding:
    """Judge `rate` (bytes/s) by the baseline in `path`; the first rate becomes the baseline.

    Raises `ConfigError` (HRT-7119) for a file that is no baseline: it is not overwritten.
    """
    known, key = _read(path), f"{platform.node()}/{device}"
    if reset or key not in known:
        _write(path, {**known, key: rate})
        return Finding(
            code="HRT-7118",
            severity=Severity.INFO,
            text=f"{device}: {rate / 1e9:.1f} GB/s, stored as this machine's baseline",
        )
    share = rate / known[key]
    slow = share < ENOUGH
    return Finding(
        code="HRT-7118",
        severity=Severity.WARNING if slow else Severity.OK,
        text=f"{device}: {rate / 1e9:.1f} GB/s, {share:.0%} of the baseline "
        f"{known[key] / 1e9:.1f} GB/s",
        fix="stop other work on the card, then see temperature, clock and health in "
        "`halogen doctor`; --reset accepts the new figure"
        if slow
        else "",
    )


def _read(path: Path) -> dict[str, float]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise _unusable(path, str(exc)) from exc
    if not isinstance(found, dict) or not all(map(_is_rate, found.values())):
        raise _unusable(path, "it is not an object of positive numbers")
    return {str(key): float(value) for key, value in found.items()}


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def _write(path: Path, rates: dict[str, float]) -> None:
    """Whole or not at all."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(rates, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError as exc:
        raise _unusable(path, str(exc)) from exc


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"bandwidth baseline `{path}` cannot be used: {why}",
        code="HRT-7119",
        fix="remove it to measure afresh, or name another file with --baseline",
    )
