"""Running cases in processes of their own: a crash is CRASH, a hang is TIMEOUT, the rest goes on."""

from __future__ import annotations

import os
import select
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from halogen_conformance.case import Measurement, Result, Status
from halogen_conformance.process import CLOSE, Process
from halogen_conformance.shares import Shares
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


def run_cases(
    target: Target,
    ids: Sequence[str],
    told: Told,
    report: Callable[[Result], None],
    *,
    timeouts: Mapping[str, float],
    patience: float = 1.0,
    jobs: int = 1,
) -> None:
    """Run `ids`, each reported once, in order where `jobs` is 1; `patience` multiplies timeouts."""
    with tempfile.TemporaryDirectory(prefix="halogen-conform-") as folder:
        run = _Run(
            target=target,
            shares=Shares(ids, min(jobs, len(ids))),
            told=told,
            report=report,
            timeouts=timeouts,
            patience=patience,
            folder=Path(folder),
        )
        run.all(min(jobs, len(ids)))


@attrs.define(kw_only=True)
class _Run:
    """Workers beside each other, and what they have left to do."""

    target: Target
    shares: Shares
    told: Told
    report: Callable[[Result], None]
    timeouts: Mapping[str, float]
    patience: float
    folder: Path
    threads: int | None = None
    """Of each worker; None: as many as the machine has."""
    crashes: Counter[str] = attrs.field(factory=Counter)
    """In a row, by level."""
    workers: dict[int, Process] = attrs.field(factory=dict)

    def all(self, workers: int) -> None:
        """Run everything; whatever happens, no process stays."""
        if workers > 1:
            self.threads = max(1, (os.cpu_count() or 1) // workers)
            self.target = self.target.with_threads(self.threads)
        try:
            for number in range(workers):
                self._start(number)
            while self.workers:
                self._turn()
        finally:
            for process in self.workers.values():
                process.end()

    def _start(self, number: int) -> None:
        """A new process for worker `number`, if there is anything left to do."""
        if (case_id := self.shares.take(number)) is not None:
            log = self.folder / f"output-{number}"
            self.workers[number] = process = Process.start(self.target, log, self.threads)
            process.give(case_id)

    def _turn(self) -> None:
        """Hear who speaks; look after who does not."""
        gone = {n for n, process in self.workers.items() if process.popen.poll() is not None}
        pipes = [process.answers for process in self.workers.values()]
        ready, _, _ = select.select(pipes, [], [], 0.2)
        for number, process in list(self.workers.items()):
            heard = process.hear() if process.answers in ready else None
            if heard is not None:
                for message in heard:
                    self._take(number, process, message)
            elif number in gone or (process.popen.poll() is not None and process.answers in ready):
                self._ended(process)
                self._replace(number, process)
            elif time.monotonic() - process.since > self._limit(process):
                self._hung(process)
                self._replace(number, process)

    def _limit(self, process: Process) -> float:
        """Seconds that it may be silent."""
        usual = self.timeouts.get(process.case_id, CLOSE_S) if process.began else START_S
        return usual * self.patience

    def _take(self, number: int, process: Process, message: dict[str, Any]) -> None:
        if "result" in message:
            result = result_from(message["result"])
            self.crashes[result.id[1]] = 0
            process.give(self.shares.take(number) or CLOSE)
            self.report(result)
        elif "opened" in message:
            if not any(_alike(message["opened"], other) for other in self.told.opened):
                self.told.opened.append(message["opened"])
        elif "extras" in message:
            self.told.extras = message["extras"]
        elif message.get("closed"):
            self.told.troubles.append(f"closing the backend failed: {message['closed']}")

    def _replace(self, number: int, process: Process) -> None:
        process.end()
        del self.workers[number]
        self._start(number)

    def _ended(self, process: Process) -> None:
        words = f"process ended with {exit_text(process.popen.returncode)}"
        if process.case_id == CLOSE:
            if process.popen.returncode != 0:
                self.told.troubles.append(f"the {words} while closing")
        elif process.began:
            self._blame(process, Status.CRASH, words)
        else:
            self.told.troubles.append(f"{words} outside of a case: {process.output()[-500:]}")
            self._blame(process, Status.CRASH, f"{words} before the case began")

    def _hung(self, process: Process) -> None:
        process.dump_stacks()
        words = f"no answer within {self._limit(process):.0f} s"
        if process.case_id == CLOSE:
            self.told.troubles.append(f"closing the backend: {words}")
        else:
            self._blame(process, Status.TIMEOUT, words)

    def _blame(self, process: Process, status: Status, words: str) -> None:
        case_id, output = process.case_id, process.output()
        self.report(Result(id=case_id, status=status, reason=words, output=output))
        level = case_id[1]
        self.crashes[level] += 1
        if self.crashes[level] >= CRASHES_IN_A_ROW:
            reason = f"the process crashed or hung {self.crashes[level]} times in a row"
            for left in self.shares.drop(level):
                self.report(Result(id=left, status=Status.NOT_RUN, reason=reason))


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two opened backends claim the same; free memory differs from worker to worker."""
    return all(one[part] == other[part] for part in ("capabilities", "placement"))


def result_from(data: dict[str, Any]) -> Result:
    """A result as a worker or a report wrote it."""
    fields = dict(data)
    measured = [{k: v for k, v in m.items() if k != "ratio"} for m in fields["measurements"]]
    fields["measurements"] = tuple(Measurement(**m) for m in measured)
    return Result(**{**fields, "status": Status(fields["status"])})
