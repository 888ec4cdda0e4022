"""Write the must-pass lists of this suite version: `python -m halogen_conformance.freeze`.

Only for a new suite version: the lists of a released one never change (a test compares them).
"""

from __future__ import annotations

from pathlib import Path

from halogen_conformance import LEVELS, SUITE_VERSION
from halogen_conformance.catalogue import must_pass_text

FOLDER = Path(__file__).parent / "mustpass" / SUITE_VERSION


def main() -> None:
    """Write one file per level."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for level in LEVELS:
        (FOLDER / f"L{level}.txt").write_text(must_pass_text(level), encoding="utf-8")


if __name__ == "__main__":
    main()
