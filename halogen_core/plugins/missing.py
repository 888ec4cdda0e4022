"""What to say of a backend that no installed plugin offers."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from halogen_core.errors import PluginError


@cache
def packages() -> dict[str, tuple[str, str]]:
    """Name or alias of a backend of ours -> its package, and what pip installs in a checkout.

    The names of packages are no advice: they are on no index yet, where others could take them.
    """
    text = files("halogen_core.plugins").joinpath("known_backends.toml").read_text("utf-8")
    return {
        alias: (known["package"], known["folders"])
        for name, known in tomllib.loads(text).items()
        for alias in (name, *known.get("aliases", ()))
    }


def advice(name: str) -> str:
    """How to install one of `packages`."""
    return f"in a checkout of halogen: pip install {packages()[name][1]}"


def not_installed(name: str, installed: Sequence[str], aliases: Sequence[str]) -> PluginError:
    """The error for `name`: the package that has it, or the nearest name there is.

    `installed` are the names of backends that could be chosen, `aliases` all they answer to.
    """
    listed = ", ".join(installed) or "none"
    if name in packages():
        text, fix = f"backend `{name}` is not installed", advice(name)
    else:
        text = f"there is no backend `{name}`"
        near = difflib.get_close_matches(name, [*installed, *aliases, *packages()], n=1)
        fix = "name one of these, or pip install the plugin that provides it"
        if near:
            there = near[0] in aliases or near[0] in installed
            how = "" if there else f" ({advice(near[0])})"
            fix = f"did you mean `{near[0]}`?{how}"
    return PluginError(f"{text}; installed: {listed}", code="HRT-1107", fix=fix)
