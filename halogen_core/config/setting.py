"""What is known about one setting: its type, default, limits and names."""

from __future__ import annotations

from typing import Any

import attrs

from halogen_core.config.values import Kind


@attrs.frozen(kw_only=True)
class Setting:
    """What is known about one setting; `aliases` are other names a file may use."""

    name: str
    section: str
    kind: Kind
    default: object
    doc: str
    aliases: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "HALOGEN_" + self.name.upper()


def setting(
    kind: Kind,
    default: object,
    doc: str,
    *,
    aliases: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """A field of a section."""
    about = {
        "kind": kind,
        "doc": doc,
        "aliases": aliases,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "secret": secret,
    }
    return attrs.field(default=default, metadata=about, repr=not secret)
