"""Write the signatures of the seam to `halogen_core/spi/api.lock`.

A change of the lock needs a bump of `SPI_VERSION` (minor for additions, major for the rest); the
architecture tests compare the lock with the code.
"""

from __future__ import annotations

import enum
import inspect
from pathlib import Path
from typing import Any

import attrs

from halogen_core import spi
from halogen_core.spi import hookspecs

LOCK = Path(spi.__file__).with_name("api.lock")
LAZY = set(spi._LAZY)  # an implementation, not a contract


def signatures() -> str:
    """Every public name of the seam with its fields, members or signature, a line each."""
    lines = [f"SPI {spi.SPI_VERSION[0]}.{spi.SPI_VERSION[1]}"]
    for name in sorted(set(spi.__all__) - LAZY - {"SPI_VERSION"}):
        lines += describe(name, getattr(spi, name))
    for name, hook in sorted(vars(hookspecs).items()):
        if name.startswith("halogen_"):
            lines.append(f"hook {name}{inspect.signature(hook)}")
    return "\n".join(lines) + "\n"


def describe(name: str, value: Any) -> list[str]:
    """One name of the seam."""
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return [f"enum {name}: {', '.join(str(m.value) for m in value)}"]
    if inspect.isclass(value) and attrs.has(value):
        return [f"record {name}.{f.name}: {f.type}" for f in attrs.fields(value)]
    if inspect.isclass(value):
        return [f"class {name}"] + [
            f"method {name}.{m}{inspect.signature(f)}"
            for m, f in sorted(vars(value).items())
            if inspect.isfunction(f) and not m.startswith("_")
        ]
    if inspect.isfunction(value):
        return [f"function {name}{inspect.signature(value)}"]
    if isinstance(value, dict):
        return [f"table {name}: {', '.join(map(str, value))}"]
    if isinstance(value, (str, tuple)):
        return [f"constant {name} = {value!r}"]
    return [f"name {name}"]


if __name__ == "__main__":
    LOCK.write_text(signatures(), encoding="utf-8")
    print(f"wrote {LOCK}")
