"""Running cases in processes of their own: a crash is CRASH, a hang is TIMEOUT, the rest goes on."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from halogen_conformance.case import Measurement, Result, Status
from halogen_conformance.target import Target, exit_text

START_S = 180.0
"""For a worker to load the core and the plugin."""
CLOSE_S = 60.0
CRASHES_IN_A_ROW = 5
"""Then the rest of a level is NOT_RUN: every case would only crash again."""


@attrs.define(kw_only=True)
class Told:
    """What workers told beside results."""

    extras: dict[str, Any] = attrs.field(factory=dict)
    opened: list[dict[str, Any]] = attrs.field(factory=list)
    troubles: list[str] = attrs.field(factory=list)
    """Closing that failed or hung, output at crashes."""


@attrs.define(kw_only=True)
class _Run:
    """One worker process and what it still has to do."""

    process: subprocess.Popen[str]
    pipe: int
    log: Path
    pending: list[str]
    current: str = ""
    since: float = attrs.field(factory=time.monotonic)
    buffer: bytes = b""


def run_cases(
    target: Target,
    ids: Sequence[str],
    told: Told,
    report: Callable[[Result], None],
    *,
    timeouts: dict[str, float],
    patience: float = 1.0,
) -> None:
    """Run `ids` in order, each reported once; `patience` multiplies all timeouts."""
    pending, crashes = list(ids), 0
    with tempfile.TemporaryDirectory(prefix="halogen-conform-") as folder:
        while pending:
            if crashes >= CRASHES_IN_A_ROW:
                for case_id in pending:
                    reason = f"the process crashed or hung {crashes} times in a row"
                    report(Result(id=case_id, status=Status.NOT_RUN, reason=reason))
                return
            run = _start(target, pending, Path(folder) / "output")
            done = _watch(run, told, report, timeouts, patience)
            crashes = crashes + 1 if done == 0 else 1
            pending = run.pending
            if not pending:
                return


def _start(target: Target, ids: Sequence[str], log: Path) -> _Run:
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "halogen_conformance.worker", str(writer), target.to_json()]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=(writer,),
            start_new_session=True,
            text=True,
            # waiting threads that spin make tiny ops slow on a busy machine
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
        )
    os.close(writer)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("\n".join(ids))
        process.stdin.close()
    return _Run(process=process, pipe=reader, log=log, pending=list(ids))


def _watch(
    run: _Run,
    told: Told,
    report: Callable[[Result], None],
    timeouts: dict[str, float],
    patience: float,
) -> int:
    """Follow one worker to its end; how many results it gave before something happened."""
    given = 0

    def reported(result: Result) -> None:
        nonlocal given
        given += 1
        report(result)

    try:
        while True:
            limit = CLOSE_S if run.current == "close" else timeouts.get(run.current, START_S)
            if _read(run):
                while b"\n" in run.buffer:
                    line, _, run.buffer = run.buffer.partition(b"\n")
                    _take(run, json.loads(line), told, reported)
            elif run.process.poll() is not None:
                _ended(run, told, report)
                return given
            elif time.monotonic() - run.since > limit * patience:
                _hung(run, limit * patience, told, report)
                return given
    finally:
        _kill(run)
        os.close(run.pipe)


def _read(run: _Run) -> bool:
    """Wait a little for more from the worker; False: nothing came."""
    ready, _, _ = select.select([run.pipe], [], [], 0.2)
    if not ready:
        return False
    chunk = os.read(run.pipe, 1 << 16)
    run.buffer += chunk
    if not chunk:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(timeout=0.2)
    return bool(chunk)


def _take(run: _Run, message: dict[str, Any], told: Told, report: Callable[[Result], None]) -> None:
    if "start" in message:
        run.current, run.since = message["start"], time.monotonic()
    elif "result" in message:
        run.pending.remove(message["result"]["id"])
        run.current = ""
        report(result_from(message["result"]))
    elif "opened" in message:
        told.opened.append(message["opened"])
    elif "extras" in message:
        told.extras = message["extras"]
    elif message.get("closed"):
        told.troubles.append(f"closing the backend failed: {message['closed']}")


def result_from(data: dict[str, Any]) -> Result:
    """A result as a worker or a report wrote it."""
    fields = dict(data)
    measured = [{k: v for k, v in m.items() if k != "ratio"} for m in fields["measurements"]]
    fields["measurements"] = tuple(Measurement(**m) for m in measured)
    return Result(**{**fields, "status": Status(fields["status"])})


def _ended(run: _Run, told: Told, report: Callable[[Result], None]) -> None:
    """The process is gone; whose fault was it?"""
    code = run.process.returncode
    if run.current == "close" and code != 0:
        told.troubles.append(f"the process ended with {exit_text(code)} while closing")
    if not run.pending:
        return
    words = f"process ended with {exit_text(code)}"
    if run.current in run.pending:
        _blame(run, Status.CRASH, words, report)
    else:
        told.troubles.append(f"{words} outside of a case: {_tail(run.log)[-500:]}")
        run.current = run.pending[0]
        _blame(run, Status.CRASH, f"{words} before the case began", report)


def _hung(run: _Run, limit: float, told: Told, report: Callable[[Result], None]) -> None:
    words = f"no answer within {limit:.0f} s"
    if run.current == "close":
        told.troubles.append(f"closing the backend: {words}")
        return
    run.current = run.current or run.pending[0]
    _blame(run, Status.TIMEOUT, words, report)


def _blame(run: _Run, status: Status, words: str, report: Callable[[Result], None]) -> None:
    run.pending.remove(run.current)
    output = _tail(run.log)
    report(Result(id=run.current, status=status, reason=words, output=output))


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-3000:]


def _kill(run: _Run) -> None:
    """End what the worker started and did not end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()
