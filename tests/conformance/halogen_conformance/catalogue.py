"""All cases of the suite, and the frozen lists of what must pass."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files

from halogen_conformance import LEVELS, SUITE_VERSION
from halogen_conformance.case import Case
from halogen_conformance.cases import TOPICS
from halogen_core.errors import ConfigError


def all_cases(extra: Sequence[str] = ()) -> tuple[Case, ...]:
    """The suite's cases by level and name, then those of plugin factories `"pkg.mod:fn"`."""
    own = suite_cases()
    known = {case.id for case in own}
    more = [case for name in extra for case in _from_factory(name)]
    for case in more:
        if case.id in known:
            raise ConfigError(
                f"case `{case.id}` exists already; a plugin's cases need ids of their own",
                code="HRT-6004",
                fix="put the plugin's name into the id",
            )
        known.add(case.id)
    return (*own, *more)


@cache
def suite_cases() -> tuple[Case, ...]:
    """The suite's own cases, in running order."""
    found: dict[str, Case] = {}
    for name in TOPICS:
        for case in importlib.import_module(f"halogen_conformance.cases.{name}").cases():
            assert case.id not in found, case.id
            found[case.id] = case
    return tuple(sorted(found.values(), key=lambda case: case.level))


def _from_factory(name: str) -> Iterator[Case]:
    module, _, attribute = name.partition(":")
    yield from getattr(importlib.import_module(module), attribute)()


# ---------------------------------------------------------------- must-pass lists


def must_pass_text(level: int) -> str:
    """The list as the code stands: a line each, `!` before ids that may not be UNSUPPORTED."""
    lines = [
        ("! " if case.required else "  ") + case.id for case in suite_cases() if case.level == level
    ]
    return "\n".join(sorted(lines, key=lambda line: line[2:])) + "\n"


def must_pass(level: int) -> dict[str, bool]:
    """Id -> required, from the frozen list of this suite version."""
    text = _frozen(f"L{level}.txt")
    return {line[2:]: line.startswith("!") for line in text.splitlines()}


def must_pass_digest() -> str:
    """sha256 over the frozen lists of all levels."""
    text = "".join(_frozen(f"L{level}.txt") for level in LEVELS)
    return hashlib.sha256(text.encode()).hexdigest()


def _frozen(name: str) -> str:
    folder = files("halogen_conformance").joinpath("mustpass", SUITE_VERSION)
    return folder.joinpath(name).read_text(encoding="utf-8")
