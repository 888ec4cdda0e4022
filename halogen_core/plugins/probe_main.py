"""The child process of a probe: `python -m halogen_core.plugins.probe_main FD QUESTION`."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import threading

import pluggy

from halogen_core.plugins.probe import encode_result
from halogen_core.spi import ProbeContext, ProbeResult, Reason, hookspecs


def answer(question: str) -> ProbeResult:
    """Load one plugin and call its probe; a probe that raises becomes a reason."""
    ask = json.loads(question)
    hooks = pluggy.PluginManager(hookspecs.PROJECT)
    hooks.add_hookspecs(hookspecs)
    try:
        hooks.register(importlib.import_module(ask["module"]))
        context = ProbeContext(device=ask["device"], options=ask["options"])
        results = hooks.hook.halogen_probe(name=ask["backend"], context=context)
    except Exception as exc:
        text = f"probe raised {type(exc).__name__}: {exc}"
        return ProbeResult(score=0, reasons=(Reason(code="probe_error", text=text),))
    if len(results) != 1 or not isinstance(results[0], ProbeResult):
        text = f"probe returned {results!r}, not one ProbeResult"
        return ProbeResult(score=0, reasons=(Reason(code="probe_answer", text=text),))
    return results[0]


def _end_with(asker: socket.socket) -> None:
    """End this process and all that it started when the one that asked is gone."""
    asker.recv(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with, args=[channel], daemon=True).start()
    channel.sendall(encode_result(answer(sys.argv[2])))
    channel.shutdown(socket.SHUT_WR)  # a process that a driver left behind may hold it too
