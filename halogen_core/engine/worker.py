"""The engine's own process: `python -m halogen_core.engine.worker FD`."""

from __future__ import annotations

import sys

from halogen_core.engine.garbage import none_while_starting


def main() -> int:
    none_while_starting()  # before the imports that follow
    from halogen_core.engine.hosting import serve

    return serve(int(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
