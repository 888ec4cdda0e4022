"""What runs here: the real runtime, or why not. Runs in the probe's own process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from halogen_ascend.device_string import parse_device
from halogen_ascend.import_errors import explain_import_error
from halogen_ascend.sim.profiles import profile
from halogen_core.spi import DeviceInfo, HalogenError, ProbeContext, ProbeResult, Reason

TIMEOUT_S = 20.0
# where torch_npu is absent, importing torch first would cost every start seconds
_QUESTION = """
import importlib.util
if importlib.util.find_spec("torch_npu") is None:
    raise ModuleNotFoundError("No module named 'torch_npu'")
import torch, torch_npu
print(torch_npu.npu.device_count())
"""
Run = Callable[[], "subprocess.CompletedProcess[str]"]


def probe(context: ProbeContext, run: Run | None = None) -> ProbeResult:
    """The simulator only when it is named; the real device only when it answers."""
    try:
        choice = parse_device(context.device)
        if choice.runtime == "sim":
            return _simulated(profile(choice.profile).name)
    except HalogenError as exc:
        reason = Reason(code=exc.code, text=exc.message, hint=exc.fix or "")
        return ProbeResult(score=0, reasons=(reason,))
    count, reasons = count_devices(run or ask_torch_npu)
    if choice.index >= count:
        return ProbeResult(score=0, reasons=reasons or (_absent(choice.index, count),))
    devices = tuple(DeviceInfo(id=f"ascend:{i}", name="Ascend NPU") for i in range(count))
    return ProbeResult(score=90, devices=devices)


def count_devices(run: Run) -> tuple[int, tuple[Reason, ...]]:
    """NPUs that torch_npu sees, asked in a subprocess; 0 with the reason when it cannot run."""
    try:
        done = run()
    except (OSError, subprocess.TimeoutExpired) as exc:
        return 0, (Reason(code="HRT-7110", text=f"torch_npu did not answer: {exc}"),)
    if done.returncode == 0 and (words := done.stdout.split()) and words[-1].isdecimal():
        return int(words[-1]), ()
    finding = explain_import_error(done.stderr)
    return 0, (Reason(code="HRT-7110", text=finding.cause, hint=finding.fix),)


def ask_torch_npu() -> subprocess.CompletedProcess[str]:
    """Import torch_npu in a process of its own and let it count."""
    # torch's autoload of an installed but broken torch_npu breaks `import torch` itself
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run(
        [sys.executable, "-c", _QUESTION],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )


def _simulated(name: str) -> ProbeResult:
    device = DeviceInfo(id=f"ascend:sim:{name}", name=f"simulated {name}", arch=name)
    note = Reason(code="simulated", text="simulated numerics and simulated time, no NPU")
    return ProbeResult(score=1, devices=(device,), reasons=(note,))


def _absent(index: int, count: int) -> Reason:
    return Reason(
        code="HRT-7110",
        text=f"device `ascend:{index}` is absent: torch_npu sees {count}",
        hint="the simulator is used only when named: --device ascend:sim:910B2",
    )
