"""How a mutant is written down: a function that breaks an opened backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from halogen_conformance.mutants import TOPICS

Break = Callable[[Any], None]


@attrs.frozen(kw_only=True)
class Mutant:
    """One defect; `cases` are patterns of ids of which at least one must not pass."""

    name: str
    defect: str
    topic: str
    cases: Sequence[str]
    apply: Break
    deterministic: bool = False
    dtype: str | None = None
    eight_bit: bool = False
    """Made from a backend that rounds activations to 8 bits and declares it."""

    @property
    def level(self) -> int:
        """Where it belongs: the level of the cases that kill it."""
        return int(self.cases[0][1])


_FOUND: dict[str, Mutant] = {}


def mutant(
    *cases: str, deterministic: bool = False, dtype: str | None = None, eight_bit: bool = False
) -> Any:
    """Register the function below; its docstring is the defect, `cases` ids or patterns."""

    def register(function: Break) -> Break:
        name = function.__name__.replace("_", "-")
        assert name not in _FOUND, name
        assert function.__doc__, name
        _FOUND[name] = Mutant(
            name=name,
            defect=function.__doc__.strip().splitlines()[0],
            topic=function.__module__.rpartition(".")[2],
            cases=cases,
            apply=function,
            deterministic=deterministic,
            dtype=dtype,
            eight_bit=eight_bit,
        )
        return function

    return register


def all_mutants() -> tuple[Mutant, ...]:
    """Every mutant of every topic."""
    for topic in TOPICS:
        importlib.import_module(f"halogen_conformance.mutants.{topic}")
    return tuple(sorted(_FOUND.values(), key=lambda m: (m.level, m.topic, m.name)))
