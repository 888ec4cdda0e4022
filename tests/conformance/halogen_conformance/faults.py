"""A plugin for the suite's own servers: the backend under test, with faults on command.

`install` writes it as a distribution into a folder that only those servers have on their path. Each
step looks into a control file for what goes wrong next.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import attrs

from halogen_conformance.case import Opening
from halogen_conformance.target import Target
from halogen_core.spi import BackendOptions, DeviceLost, RunsAhead, Transient

NAME = "conformance_faults"
PLUGIN = f'''
from halogen_core.spi import BackendSpec, DeviceInfo, ProbeResult, hookimpl

@hookimpl
def halogen_backends():
    return [BackendSpec(name="{NAME}", factory="halogen_conformance.faults:create")]

@hookimpl
def halogen_probe(name, context):
    if name != "{NAME}":
        return None
    return ProbeResult(score=1, devices=(DeviceInfo(id="{NAME}:0", name="faults"),))
'''


def install(folder: Path) -> None:
    """Write package and metadata into `folder`."""
    package, info = folder / NAME, folder / f"{NAME}-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(PLUGIN)
    (package / "halogen-backend.toml").write_text(
        f'manifest = 1\nname = "{NAME}"\nspi = ">=1.0,<2"\n'
    )
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[halogen.plugins]\n{NAME} = {NAME}.plugin\n")


def create(options: BackendOptions) -> Any:
    """The backend under test (option `target`), its steps watched by file `control`."""
    target = Target.from_json(Path(options.extra["target"]).read_text(encoding="utf-8"))
    backend = target.open(Opening(deterministic=options.deterministic))
    kind = FaultyAhead if isinstance(backend, RunsAhead) else Faulty
    return kind(backend, Path(options.extra["control"]))


class Faulty:
    """A backend that fails when told to; nothing of the backend itself is touched."""

    def __init__(self, backend: Any, control: Path) -> None:
        self._backend, self._control = backend, control
        self._capturing = False
        self.ops = _Ops(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def upload_step(self, batch: Any) -> Any:
        _fail_if_told(self._control)
        return self._backend.upload_step(batch)

    def capture(self, step: Any, batch: Any) -> Any:
        self._capturing = True
        try:
            replay = self._backend.capture(step, batch)
        finally:
            self._capturing = False
        if replay is None:
            return None

        def watched(batch: Any) -> Any:
            _fail_if_told(self._control)
            return self.short(replay(batch))

        return watched

    def short(self, sampled: Any) -> Any:
        """What was sampled, less a row when told to."""
        if self._capturing or not _take(self._control, "wrong_shape"):
            return sampled
        ids = self._backend.download(sampled.token_ids)[:-1]
        return attrs.evolve(sampled, token_ids=self._backend.upload(ids))


class FaultyAhead(Faulty):
    """The same of a backend that queues steps: Python looks for a protocol's methods in the class."""

    def fetch(self, sampled: Any) -> Any:
        return self._backend.fetch(sampled)


class _Ops:
    """The backend's ops, `sample` watched."""

    def __init__(self, faulty: Faulty) -> None:
        self._faulty = faulty

    def __getattr__(self, name: str) -> Any:
        return getattr(self._faulty._backend.ops, name)

    def sample(self, logits: Any, meta: Any) -> Any:
        return self._faulty.short(self._faulty._backend.ops.sample(logits, meta))


def _fail_if_told(control: Path) -> None:
    if _take(control, "device_lost"):
        raise DeviceLost("the suite took the device away")
    if _take(control, "transient"):
        raise Transient("the suite asks for patience", retry_after_s=0.02)
    if _take(control, "hang"):
        time.sleep(3600)
    if _take(control, "slow"):
        time.sleep(0.4)


def _take(control: Path, fault: str) -> bool:
    """Whether `fault` is ordered; one order fewer afterwards."""
    try:
        orders = control.read_text(encoding="utf-8").split()
    except OSError:
        return False
    if fault not in orders:
        return False
    orders.remove(fault)
    control.write_text(" ".join(orders), encoding="utf-8")
    return True
