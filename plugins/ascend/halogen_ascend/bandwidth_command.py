"""`halogen doctor-bandwidth`: measure, compare with this machine's baseline, tell."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from halogen_core.spi import BackendOptions, Severity


@click.command("doctor-bandwidth")
@click.option("--device", default="ascend", show_default=True)
@click.option("--baseline", required=True, type=click.Path(path_type=Path), help="JSON file.")
@click.option("--reset", is_flag=True, help="Make this measurement the baseline.")
@click.option("--backend-option", "extra", multiple=True, metavar="KEY=VALUE")
def bandwidth_command(device: str, baseline: Path, reset: bool, extra: tuple[str, ...]) -> None:
    """Copy within HBM and compare with the baseline; exit code 1 below 90 % of it."""
    from halogen_ascend.calibration import compare

    pairs = (item.partition("=") for item in extra)
    options = BackendOptions(device=device, extra={key: value for key, _, value in pairs})
    finding = compare(baseline, *measure(options), reset=reset)
    click.echo(finding.text)
    if finding.severity is Severity.WARNING:
        click.echo(f"fix: {finding.fix}")
        sys.exit(1)


def measure(options: BackendOptions) -> tuple[str, float]:
    """(device, bytes per second): the simulated clock of `ascend:sim`, else a real copy."""
    from halogen_ascend.backend import create
    from halogen_ascend.calibration import copied_bandwidth, simulated_bandwidth
    from halogen_ascend.sim.backend import SimBackend

    backend = create(options)
    try:
        if isinstance(backend, SimBackend):
            return f"ascend:{backend.device.name}", simulated_bandwidth(backend.device)
        name = options.device or "ascend"
        device = getattr(backend, "device")  # noqa: B009 - the seam has no torch device
        return name, copied_bandwidth(device, backend.synchronize)
    finally:
        backend.close()
