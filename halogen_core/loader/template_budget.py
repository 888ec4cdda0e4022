"""How much a chat template may compute: turns, seconds and the size of what it makes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

MAX_SECONDS = 1.0
MAX_SIZE = 4_000_000
"""Of one value and of the whole text: characters, about."""
MAX_TOTAL = 1 << 28
"""Of all values made in one render."""
MAX_TURNS = 1_000_000
MAX_INT_BITS = 4096
MAX_WIDTH = 100
_ITEM_SIZE = 8
_WIDE_FIELD = re.compile(r"\{[^{}]*(?:\{|:[^{}]*\d{3})")


class OverBudget(Exception):
    """The template wants more than it may have."""


@attrs.define
class Budget:
    """What one render has used."""

    deadline: float = attrs.field(factory=lambda: time.monotonic() + MAX_SECONDS)
    turns: int = 0
    total: int = 0

    def take(self, size: int) -> None:
        """Count one turn that makes `size` characters."""
        self.turns += 1
        self.total += size
        if self.turns > MAX_TURNS:
            raise OverBudget(f"more than {MAX_TURNS} turns of its loops")
        if self.total > MAX_TOTAL:
            raise OverBudget(f"more than {MAX_TOTAL} characters in all its values")
        if time.monotonic() > self.deadline:
            raise OverBudget(f"more than {MAX_SECONDS} s")


def size_of(value: Any) -> int:
    """Characters that `str(value)` has, about; raises `OverBudget` above `MAX_SIZE`.

    Containers count as often as they are referred to, so a list of a list of lists counts in full;
    namespaces, macros and generators count as one thing.
    """
    size, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            size += len(item) + 2
        elif isinstance(item, Mapping):
            pending += item.keys()
            pending += item.values()
            size += 2 + 2 * _ITEM_SIZE * len(item)
        elif isinstance(item, list | tuple):
            pending += item
            size += 2 + _ITEM_SIZE * len(item)
        else:
            size += 4 + (item.bit_length() // 3 if isinstance(item, int) else 0)
        check_size(size)
    return size


def check_size(size: int) -> None:
    """Raise `OverBudget` for a value of that many characters if it is too large."""
    if size > MAX_SIZE:
        raise OverBudget(f"a value of more than {MAX_SIZE} characters")


# ---------------------------------------------------------------- what grows faster than its input


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raise `OverBudget` if the result would be far larger than the operands may be."""
    if operator == "%" and isinstance(left, str):
        raise OverBudget("text formatting, which has widths without bound")
    if operator not in ("*", "**"):
        return
    for count, other in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(other, str | list | tuple):
            check_size(count * size_of(other))
    if isinstance(left, int) and isinstance(right, int):
        a, b = left.bit_length(), right.bit_length()
        bits = a + b if operator == "*" else a * max(right, 1)
        if bits > MAX_INT_BITS:
            raise OverBudget(f"a number of more than {MAX_INT_BITS} bits")


def check_format(pattern: str, values: Any) -> None:
    """Raise `OverBudget` unless `pattern.format(…)` of `values` stays small."""
    plain = pattern.replace("{{", "").replace("}}", "")
    if _WIDE_FIELD.search(plain):
        raise OverBudget("a wide format")
    check_size(len(pattern) + plain.count("{") * (size_of(values) + MAX_WIDTH))


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    check_size(len(text) + text.count(old) * len(new))


def _check_join(items: Any, separator: Any = "", attribute: Any = None) -> None:
    if attribute is not None:
        raise OverBudget("`join` by attribute; use `map(attribute=…)` first")
    check_size(size_of(items) + len(items) * len(str(separator)))


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    columns = len(width) if isinstance(width, str) else int(width)
    if columns > MAX_WIDTH:
        raise OverBudget(f"an indent of more than {MAX_WIDTH}")
    check_size(len(str(text)) + (str(text).count("\n") + 1) * columns)


def _check_json(_value: Any, *args: Any, indent: Any = 0, **__: Any) -> None:
    columns = args[1] if len(args) > 1 else indent
    if isinstance(columns, int) and columns > MAX_WIDTH:
        raise OverBudget(f"an indent of more than {MAX_WIDTH}")


GROWING_FILTERS: Mapping[str, Callable[..., None]] = {
    "replace": _check_replace,
    "join": _check_join,
    "indent": _check_indent,
    "tojson": _check_json,
}
"""Filter -> check of its arguments."""

GROWING_METHODS: Mapping[str, Callable[..., None]] = {
    "replace": _check_replace,
    "join": lambda separator, items: _check_join(items, separator),
}
"""Method of text -> check of the text and the arguments."""
