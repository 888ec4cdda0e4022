"""Loader messages explained, from a table."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files

import attrs


@attrs.frozen
class Explained:
    """A cause in plain words, and what to do."""

    cause: str
    fix: str


@cache
def _entries() -> tuple[tuple[re.Pattern[str], str, str], ...]:
    text = files("halogen_ascend").joinpath("import_errors.toml").read_text(encoding="utf-8")
    return tuple(
        (re.compile(e["match"]), e["cause"], e["fix"]) for e in tomllib.loads(text)["entry"]
    )


def explain_import_error(text: str) -> Explained:
    """The first entry that fits; otherwise the message's own last line."""
    for pattern, cause, fix in _entries():
        if found := pattern.search(text):
            return Explained(cause.format(**found.groupdict()), fix)
    last = text.strip().splitlines()[-1:] or ["it ended without a message"]
    return Explained(f"torch_npu cannot start: {last[0]}", "see `halogen doctor`")
