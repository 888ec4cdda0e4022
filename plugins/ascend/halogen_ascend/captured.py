"""Where checks look: files under a root, outputs of commands, captured or live."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import attrs

from halogen_core.spi import DoctorContext

TIMEOUT_S = 10.0


@attrs.frozen
class Captured:
    """A `DoctorContext` with two questions."""

    context: DoctorContext

    def output(self, command: str) -> str | None:
        """What `command` prints; None when it was not captured and cannot be run."""
        if command in self.context.commands:
            return self.context.commands[command]
        if not self.context.live:
            return None
        try:
            done = subprocess.run(
                shlex.split(command), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    def files(self, pattern: str) -> list[tuple[str, str]]:
        """(path as on the machine, text) of files that match a glob without leading slash."""
        root = Path(self.context.root)
        found = []
        for path in sorted(root.glob(pattern)):
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            found.append((f"/{path.relative_to(root)}", text))
        return found
