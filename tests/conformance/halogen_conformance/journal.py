"""The journal of a run: every result as it comes, so that a run that was cut can go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from halogen_conformance.case import Result, Status
from halogen_conformance.catalogue import must_pass_digest
from halogen_conformance.runner import Told, result_from
from halogen_conformance.sources import changed, sources
from halogen_conformance.target import PluginFacts, Target
from halogen_core.errors import ConfigError

FILE = "journal.jsonl"


class Journal:
    """What an earlier start of the same run found, and what this one finds."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        self._resume = resume
        self._written: dict[str, Any] = {}

    def begin(self, target: Target, plugin: PluginFacts, told: Told) -> dict[str, Result]:
        """Results by id of the run that goes on, what its workers told put into `told`.

        Raises `ConfigError`: HRT-6009 when the journal is of another target or suite, HRT-6010 when
        the code of any of them has changed since it was begun.
        """
        head = {
            "target": attrs.asdict(target),
            "version": plugin.version,
            "mustpass_sha256": must_pass_digest(),
        }
        code = sources(plugin)
        lines = self._lines() if self._resume and self._path.exists() else []
        if lines:
            self._refuse_another(lines[0], head, code)
        for line in lines[1:]:
            told.extras = line.get("extras", told.extras)
            told.opened = line.get("opened", told.opened)
        found = [result_from(line["result"]) for line in lines if "result" in line]
        self._path.write_text("")
        self._line({**head, "sources": code})
        self._told(told)
        for result in found:
            self._line({"result": attrs.asdict(result)})
        return {result.id: result for result in found}

    def _refuse_another(
        self, begun: dict[str, Any], head: dict[str, Any], code: dict[str, str]
    ) -> None:
        """Raise where a journal that began so cannot go on with `head` and `code`."""
        before = begun.pop("sources", {})
        if begun != head:
            raise ConfigError(
                f"`{self._path}` is of another run: {begun}",
                code="HRT-6009",
                fix="leave out --resume, or take the options of the run that was cut",
            )
        if names := changed(before, code):
            raise ConfigError(
                f"`{self._path}` was begun with other code of {', '.join(names)}",
                code="HRT-6010",
                fix="leave out --resume: what was found then says nothing about the code of now",
            )

    def add(self, result: Result, told: Told) -> None:
        """Note a result, unless its case did not run."""
        if result.status is not Status.NOT_RUN:
            self._told(told)
            self._line({"result": attrs.asdict(result)})

    def end(self) -> None:
        """The run is whole and its report written: there is nothing to go on with."""
        self._path.unlink(missing_ok=True)

    def _told(self, told: Told) -> None:
        for name in ("extras", "opened"):
            if (value := getattr(told, name)) != self._written.get(name):
                self._line({name: value})
                self._written[name] = list(value) if name == "opened" else value

    def _line(self, data: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(data, default=str) + "\n")

    def _lines(self) -> list[dict[str, Any]]:
        """Whole lines; the last one may have been cut."""
        text = self._path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
