"""A worker process as its parent sees it: given one case at a time, heard, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs

from halogen_conformance.target import Target

CLOSE = "close"
"""What a worker does after its last case."""
DUMP_S = 0.3


@attrs.define(kw_only=True, eq=False)
class Process:
    """One worker and the case that it was given."""

    popen: subprocess.Popen[bytes]
    orders: int
    """Write end: ids, a line each."""
    answers: int
    """Read end: lines of JSON."""
    log: Path
    case_id: str = ""
    began: bool = False
    """Whether it said that it began `case_id`."""
    since: float = attrs.field(factory=time.monotonic)
    _buffer: bytes = b""

    @classmethod
    def start(cls, target: Target, log: Path, threads: int | None = None) -> Process:
        """Start a worker whose output goes to `log`; `threads`: of numeric libraries."""
        orders_read, orders = os.pipe()
        answers, answers_write = os.pipe()
        command = [sys.executable, "-m", "halogen_conformance.worker"]
        # waiting threads that spin make tiny ops slow on a busy machine
        settings = {"OMP_WAIT_POLICY": "PASSIVE"}
        if threads is not None:
            settings["OMP_NUM_THREADS"] = str(threads)
        with log.open("w") as stream:
            popen = subprocess.Popen(
                [*command, str(orders_read), str(answers_write), target.to_json()],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=(orders_read, answers_write),
                start_new_session=True,
                env={**settings, **os.environ},
            )
        os.close(orders_read)
        os.close(answers_write)
        return cls(popen=popen, orders=orders, answers=answers, log=log)

    def give(self, case_id: str) -> None:
        """Order the next case, or `CLOSE`: to close and end."""
        self.case_id, self.began, self.since = case_id, case_id == CLOSE, time.monotonic()
        # a process that is gone is found out by its silence
        with contextlib.suppress(BrokenPipeError):
            if case_id == CLOSE:
                os.close(self.orders)
                self.orders = -1
            else:
                os.write(self.orders, f"{case_id}\n".encode())

    def hear(self) -> list[dict[str, Any]] | None:
        """What it has said since, where `answers` is readable; None: it will say no more."""
        chunk = os.read(self.answers, 1 << 16)
        if not chunk:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout=0.2)
            return None
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if any("start" in message for message in messages):
            self.began, self.since = True, time.monotonic()
        return messages

    def dump_stacks(self) -> None:
        """Ask it to print where it is; it may be too far gone to answer."""
        if self.began and self.popen.poll() is None:
            self.popen.send_signal(signal.SIGUSR1)
            time.sleep(DUMP_S)

    def output(self) -> str:
        """The end of what it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]

    def end(self) -> None:
        """Kill it and whatever it started and did not end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        for pipe in (self.orders, self.answers):
            if pipe >= 0:
                os.close(pipe)
