"""The engine's process, started before there is work for it: it imports while its parent does."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from halogen_core.engine.options import EngineOptions


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
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
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
