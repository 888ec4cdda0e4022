"""Doctor's rules on clocks, heat and hangs.

None ever advises to switch thermal protection off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from halogen_core.spi import DoctorContext, Finding, Severity
from halogen_rocm.findings import finding, found
from halogen_rocm.platform import Gpu, Platform, text
from halogen_rocm.sensors import BUSY, read_sensors

FULL_CLOCK_MHZ = 2900
HOT_C = 95
IDLE_W = 60
"""A GPU that works draws more."""


def power_findings(context: DoctorContext, platform: Platform, gpu: Gpu) -> Iterator[Finding]:
    """Everything about clocks, heat and hangs."""
    yield from _clocks(gpu)
    yield from _fabric(gpu)
    yield from _profiles(context)
    yield from _thermal(gpu)
    yield from _hang(platform, gpu)


def _clocks(gpu: Gpu) -> Iterator[Finding]:
    levels = [int(n) for n in re.findall(r"(\d+)Mhz", text(gpu.path / "pp_dpm_sclk"))]
    if levels and max(levels) < FULL_CLOCK_MHZ:
        yield finding(
            "rocm.clocks",
            Severity.WARNING,
            f"the GPU's highest clock is {max(levels)} MHz, not {FULL_CLOCK_MHZ}",
            "set the platform profile to performance; a clock stuck at 900 MHz needs a cold boot",
        )
    level = text(gpu.path / "power_dpm_force_performance_level").strip()
    if level and level not in ("auto", "high"):
        yield finding(
            "rocm.clocks.level",
            Severity.WARNING,
            f"power_dpm_force_performance_level is {level}",
            "write auto to it",
        )


def _fabric(gpu: Gpu) -> Iterator[Finding]:
    """The memory's clock; which is the highest that a box has depends on its memory."""
    shown = text(gpu.path / "pp_dpm_fclk")
    levels = [int(n) for n in re.findall(r"(\d+)Mhz", shown)]
    now = re.search(r"(\d+)Mhz \*", shown)
    if not levels or not now:
        return
    clock, busy = int(now.group(1)), read_sensors(gpu).busy or 0
    what = f"memory fabric at {clock} of at most {max(levels)} MHz"
    if busy >= BUSY and clock < max(levels):
        yield finding(
            "rocm.clocks.fabric",
            Severity.WARNING,
            f"{what} while the GPU is busy: decoding goes by memory",
            "set the platform profile and the BIOS's power profile to performance",
        )
    else:
        yield found("rocm.clocks.fabric", what)


def _profiles(context: DoctorContext) -> Iterator[Finding]:
    """What the firmware and daemons were told: the same box differs by a fifth."""
    root = Path(context.root)
    profile = text(root / "sys/firmware/acpi/platform_profile").strip()
    if profile and profile != "performance":
        yield finding(
            "rocm.clocks.profile",
            Severity.WARNING,
            f"the platform profile is {profile}",
            "echo performance > /sys/firmware/acpi/platform_profile",
        )
    preference = text(
        root / "sys/devices/system/cpu/cpu0/cpufreq/energy_performance_preference"
    ).strip()
    if preference in ("power", "balance_power"):
        yield finding(
            "rocm.clocks.epp",
            Severity.WARNING,
            f"the CPU's energy preference is {preference}",
            "write performance to energy_performance_preference of every CPU",
        )
    tuned = text(root / "etc/tuned/active_profile").strip()
    if tuned and tuned != "accelerator-performance":
        yield finding(
            "rocm.clocks.tuned",
            Severity.INFO,
            f"tuned's profile is {tuned}",
            "tuned-adm profile accelerator-performance was 9 to 24 % faster in prefill",
        )


def _thermal(gpu: Gpu) -> Iterator[Finding]:
    now = read_sensors(gpu)
    if now.celsius is not None and now.celsius >= HOT_C:
        yield finding(
            "rocm.thermal",
            Severity.WARNING,
            f"the GPU is at {now.celsius:.0f} °C and will throttle",
            "improve the airflow, or cap the clock at 2400 MHz: decode stays nearly as fast",
        )
    elif now.shown:
        yield found("rocm.thermal", f"GPU: {now.shown}")


def _hang(platform: Platform, gpu: Gpu) -> Iterator[Finding]:
    """Busy at the power of an idle chip: seen with loads by memory map and broken firmware."""
    now = read_sensors(gpu)
    busy = now.busy is not None and now.busy >= 99
    if busy and now.watts is not None and now.watts < IDLE_W and platform.gpu_processes:
        yield finding(
            "rocm.hang",
            Severity.WARNING,
            f"the GPU is {now.busy:.0f} % busy at {now.watts:.0f} W: it waits rather than works",
            "if no step ends either, end the process that holds it "
            f"({', '.join(platform.gpu_processes)}); when that hangs too, reboot",
        )
