"""Reading single settings: text from a flag or variable, or a value from a TOML or YAML file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

UNITS = {
    "": 1,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_ON = {"on", "true", "yes", "1"}
_OFF = {"off", "false", "no", "0"}


class Kind:
    """A type of setting: how it reads, and how documentation calls it."""

    def __init__(self, name: str, read: Callable[[object], object], *, many: bool = False) -> None:
        self.name = name
        self.read = read
        self.many = many


def size(value: object) -> int:
    """Bytes. `4G`, `4GiB` are 4 * 2**30, `4GB` is 4 * 10**9; a plain number is bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(str(value))
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError("a size such as 512MiB, 4G or 96GiB")
    return int(float(match[1]) * unit)


def integer(value: object) -> int:
    """A whole number; 3.0 and True are not."""
    if isinstance(value, (bool, float)):
        raise ValueError("a whole number")
    try:
        return int(str(value))
    except ValueError:
        raise ValueError("a whole number") from None


def number(value: object) -> float:
    """A finite number."""
    try:
        result = float("nan") if isinstance(value, bool) else float(str(value))
    except ValueError:
        result = float("nan")
    if not math.isfinite(result):
        raise ValueError("a number")
    return result


def switch(value: object) -> bool:
    """`on` or `off`."""
    text = str(value).lower()
    if text in _ON:
        return True
    if text in _OFF:
        return False
    raise ValueError("`on` or `off`")


def text(value: object) -> str:
    """Any text that is not empty."""
    if not isinstance(value, (str, int, float)) or isinstance(value, bool) or str(value) == "":
        raise ValueError("text that is not empty")
    return str(value)


def words(value: object) -> tuple[str, ...]:
    """A list, or text separated by commas."""
    if isinstance(value, str):
        return tuple(word for part in value.split(",") if (word := part.strip()))
    if isinstance(value, (list, tuple)):
        return tuple(word for item in value for word in words(text(item)))
    raise ValueError("a list, or words separated by commas")


def pairs(value: object) -> dict[str, str]:
    """A table, or `key=value` words; a value may hold commas, like `buckets=1,2,4`."""
    if isinstance(value, dict):
        return {str(key): _joined(item) for key, item in value.items()}
    found: dict[str, str] = {}
    for part in [value] if isinstance(value, str) else _items(value):
        key = ""
        for word in words(part):
            name, equals, item = word.partition("=")
            if equals and name:
                key = name
                found[key] = item
            elif key and not equals:
                found[key] += f",{word}"
            else:
                raise ValueError("`key=value`")
    return found


def _items(value: object) -> list[str]:
    """The items of a list, each as text."""
    if not isinstance(value, (list, tuple)):
        raise ValueError("a list, or words separated by commas")
    return [text(item) for item in value]


def _joined(item: object) -> str:
    return ",".join(map(str, item)) if isinstance(item, (list, tuple)) else str(item)


def path(value: object) -> Path:
    """A path; `~` is the home directory."""
    return Path(text(value)).expanduser()


SIZE = Kind("size", size)
INTEGER = Kind("integer", integer)
NUMBER = Kind("number", number)
SWITCH = Kind("on/off", switch)
TEXT = Kind("text", text)
WORDS = Kind("list", words, many=True)
PAIRS = Kind("key=value", pairs, many=True)
PATH = Kind("path", path)
