"""The engine's process, started before there is work for it: it imports while its parent does."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from halogen_core.engine.options import EngineOptions


KEPT_BACK = (signal.SIGINT, signal.SIGTERM)
"""Signals that reach a child too early, while it imports; it ignores them later."""
LAST_WORDS_S = 0.2
"""How long a child that closed its channel may take to end by itself, so that it tells why."""


@attrs.frozen(eq=False)
class Child:
    """A process that waits for `tell` and ends with its parent."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    @classmethod
    def spawn(cls) -> Child:
        """Start it; this returns at once."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "halogen_core.engine.worker", str(theirs.fileno())]
            before = signal.pthread_sigmask(signal.SIG_BLOCK, KEPT_BACK)
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return cls(process, ours)

    def tell(self, options: EngineOptions) -> None:
        """Let it build the engine."""
        import msgspec  # the parent spawns before it imports anything

        from halogen_core.engine import wire

        start = wire.Start(msgspec.Raw(msgspec.msgpack.encode(options)))
        self.connection.sendall(wire.frame(start))

    def end(self) -> None:
        """Kill it, if it still runs."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


def last_words(process: subprocess.Popen[bytes]) -> str:
    """How `process` ended; one that does not end by itself is killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=LAST_WORDS_S)
    process.kill()
    code = process.wait()
    if code >= 0:
        return f"engine process ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    return f"engine process was ended by {name}"
