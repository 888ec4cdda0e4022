"""An engine behind a socket, in a process of its own.

The main thread is the step loop; a reader thread takes messages from the server, a writer thread
sends to it, a third compiles grammars beside both. The process ends when the server does, whatever
the step loop is doing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from typing import Any

import msgspec

from halogen_core.engine import wire
from halogen_core.engine.building import build_engine
from halogen_core.engine.child import KEPT_BACK
from halogen_core.engine.engine import Engine
from halogen_core.engine.garbage import SetAside
from halogen_core.engine.loop import EngineLoop
from halogen_core.engine.options import EngineOptions
from halogen_core.engine.protocol import GenerateRequest
from halogen_core.errors import HalogenError

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
GRACE_S = 10.0
"""How long a step may go on after the server is gone."""


class Worker:
    """One engine behind one socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._loop: EngineLoop | None = None
        self._percent = -1
        self._uncompiled: queue.SimpleQueue[GenerateRequest] = queue.SimpleQueue()
        self._compiling: set[str] = set()
        """Requests that wait for their grammar; whoever is aborted leaves it."""
        self._lock = threading.Lock()

    def run(self) -> int:
        """Serve until told to stop; the exit code."""
        writer = threading.Thread(target=self._write, name="halogen-writer", daemon=True)
        writer.start()
        try:
            start = wire.receive(self._connection)
            if not isinstance(start, wire.Start):
                return 1
            threading.Thread(target=self._read, name="halogen-reader", daemon=True).start()
            options = msgspec.msgpack.decode(start.options, type=EngineOptions)
            logging.basicConfig(level=options.log_level.upper(), format=LOG_FORMAT)
            self._engine = build_engine(options, progress=self._progress)
        except Exception as exc:
            self._fail(exc)
            self._finish(writer)
            return 1
        self._loop = EngineLoop(
            self._engine,
            lambda outputs: self._send(wire.Outputs(outputs)),
            self._fail,
            SetAside().after_step,
        )
        compiling = (self._engine, self._loop)
        threading.Thread(
            target=self._compile, args=compiling, name="halogen-grammars", daemon=True
        ).start()
        self._send(wire.Ready(self._engine.info))
        self._loop.run()
        self._finish(writer)
        return 0

    def _progress(self, done: int, total: int) -> None:
        """Tell the server once per percent, not for every tensor."""
        percent = 100 * done // max(1, total)
        if percent > self._percent:
            self._percent = percent
            self._send(wire.Loading(done, total))

    def _finish(self, writer: threading.Thread) -> None:
        self._out.put(None)
        writer.join(timeout=5)

    def _send(self, message: wire.FromEngine) -> None:
        self._out.put(wire.frame(message))

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, HalogenError):
            self._send(wire.Failed(error.code, error.message, error.fix or ""))
            return
        sys.excepthook(type(error), error, error.__traceback__)
        self._send(wire.Failed("HRT-5031", repr(error)))

    def _write(self) -> None:
        while (data := self._out.get()) is not None:
            try:
                self._connection.sendall(data)
            except OSError:
                return  # the server is gone; the reader ends the process

    def _read(self) -> None:
        try:
            while (message := wire.receive(self._connection)) is not None:
                self._handle(message)
        except (OSError, msgspec.DecodeError, HalogenError) as exc:
            print(f"halogen engine: channel to the server failed: {exc}", file=sys.stderr)
        if self._loop:  # otherwise it is loading, for nobody
            self._loop.stop(timeout_s=0)
            threading.Event().wait(GRACE_S)
        os._exit(1)

    def _handle(self, message: wire.ToEngine) -> None:
        engine, loop = self._engine, self._loop
        if engine is None or loop is None:
            os._exit(1)  # told to stop while it loads: there is nothing yet to end in order
        match message:
            case wire.Submit(request):
                self._submit(loop, request)
            case wire.Abort(request_id):
                with self._lock:
                    self._compiling.discard(request_id)
                    loop.abort(request_id)
            case wire.Ping(token):
                self._send(wire.Pong(token, loop.steps, loop.step_seconds()))
            case wire.GetStats(token):
                loop.ask(engine.stats).add_done_callback(
                    lambda f: self._send(wire.Stats(token, f.result()))
                )
            case wire.SaveCache(token, path):
                self._answer(token, loop.ask(lambda: engine.save_cache(path)))
            case wire.LoadCache(token, path):
                self._answer(token, loop.ask(lambda: engine.load_cache(path)))
            case wire.Adjust(token, settings):
                self._answer(token, loop.ask(lambda: engine.adjust(settings)))
            case wire.Stop():
                loop.stop(timeout_s=0)

    def _submit(self, loop: EngineLoop, request: GenerateRequest) -> None:
        if not request.grammar:
            loop.submit(request)
            return
        self._compiling.add(request.request_id)
        self._uncompiled.put(request)

    def _compile(self, engine: Engine, loop: EngineLoop) -> None:
        """Neither between two steps nor while pings wait; what is wrong, `submit` says."""
        while True:
            request = self._uncompiled.get()
            with contextlib.suppress(HalogenError):
                engine.grammars.check(request.grammar)
            with self._lock:
                if request.request_id in self._compiling:
                    self._compiling.discard(request.request_id)
                    loop.submit(request)

    def _answer(self, token: int, future: Future[Any]) -> None:
        def done(future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                result = future.result()
                told = {"blocks": result} if isinstance(result, int) else {"settings": result}
                self._send(wire.Done(token, **told))
            elif isinstance(error, HalogenError):
                code, text, fix = error.code, error.message, error.fix or ""
                self._send(wire.Done(token, code=code, message=text, fix=fix))
            else:
                self._send(wire.Done(token, code="HRT-5031", message=str(error)))

        future.add_done_callback(done)


def serve(fd: int) -> int:
    """Run an engine behind the socket `fd`; the exit code."""
    # ^C and a service manager's SIGTERM reach the whole group: the server decides, then says Stop
    for number in KEPT_BACK:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, KEPT_BACK)
    return Worker(socket.socket(fileno=fd)).run()
