"""Explanations of error codes; the texts are in `error_catalogue.toml` (add new codes there)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

import attrs


@attrs.frozen
class CatalogueEntry:
    """One code for people."""

    title: str
    cause: str
    fix: str


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """Every code with its explanation."""
    text = files("halogen_core").joinpath("error_catalogue.toml").read_text(encoding="utf-8")
    return {code: CatalogueEntry(**entry) for code, entry in tomllib.loads(text).items()}
