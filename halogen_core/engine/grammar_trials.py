"""Whether a grammar compiles in time and memory, found out in a process that may be lost."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from halogen_core.engine import wire
from halogen_core.engine.grammar import vocabulary_of
from halogen_core.engine.grammar_trial import MAX_MEMORY, MAX_SECONDS, Asked, Trial
from halogen_core.errors import Overloaded, RequestError, Transient
from halogen_core.loader import Tokenizer

log = logging.getLogger(__name__)

KEPT = 64
"""Grammars of which the outcome is remembered."""
MAX_WAITING = 64
PATIENCE_S = 60.0
"""Of the clock, for what takes seconds of the processor's time."""
_LIMITS: dict[int, str] = {
    signal.SIGXCPU: f"it takes more than {MAX_SECONDS} s to compile",
    signal.SIGABRT: f"it takes more than {MAX_MEMORY >> 20} MiB, or too deep a stack, to compile",
    signal.SIGSEGV: "it takes too deep a stack to compile",
}


class GrammarTrials:
    """Tries grammars out one after another, in a process that is started with the first of them."""

    def __init__(self, open_tokenizer: Callable[[], Tokenizer]) -> None:
        self._open_tokenizer = open_tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="halogen-grammar")
        self._waiting = 0
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[Asked, Trial] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    async def check(self, asked: Asked) -> Trial:
        """How trying it out went, now or before.

        Raises `RequestError` (HRT-4009) for one that does not compile within the limits,
        `Overloaded` where many wait, `Transient` where the process was lost for another reason.
        """
        if (known := self._known(asked)) is not None:
            return _passed(known)
        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{self._waiting} grammars wait to be compiled", retry_after_s=5.0)
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self.try_out, asked)
        finally:
            self._waiting -= 1

    def try_out(self, asked: Asked) -> Trial:
        """`check` in the calling thread; one thread at a time."""
        if (known := self._known(asked)) is not None:
            return _passed(known)
        trial = self._ask(asked)
        with self._lock:
            self._outcomes[asked] = msgspec.structs.replace(trial, seconds=0.0)
            while len(self._outcomes) > KEPT:
                self._outcomes.popitem(last=False)
        return _passed(trial)

    def close(self) -> None:
        """End the process; whoever waits is answered with an error."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()
        self._thread.shutdown()
        self._lose()

    def _known(self, asked: Asked) -> Trial | None:
        with self._lock:
            if (trial := self._outcomes.get(asked)) is not None:
                self._outcomes.move_to_end(asked)
        return trial

    def _ask(self, asked: Asked) -> Trial:
        channel = self._channel or self._start()
        try:
            channel.sendall(wire.frame(asked))
            answer = wire.receive_body(channel)
        except OSError:
            answer = None
        if answer is not None:
            return msgspec.msgpack.decode(answer, type=Trial)
        code = self._lose()
        if why := _LIMITS.get(-code):
            return Trial("", why, float(MAX_SECONDS))
        log.error("the process that tries grammars out ended with code %d", code)
        raise Transient("the grammar could not be compiled just now", retry_after_s=1.0)

    def _start(self) -> socket.socket:
        vocabulary = vocabulary_of(self._open_tokenizer())
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        with theirs:
            module = "halogen_core.engine.grammar_trial"
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # of a refused allocation Rust prints a page
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal is the server's business
            )
        self._channel = ours
        try:
            ours.sendall(wire.frame(vocabulary))
        except OSError:
            log.error("the process that tries grammars out did not start")
        return ours

    def _lose(self) -> int:
        """The exit code of the process, which is ended if it runs; 0 where there is none."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if channel is not None:
            channel.close()
        if process is None:
            return 0
        try:
            return process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _passed(trial: Trial) -> Trial:
    if trial.error:
        raise RequestError(f"the grammar does not compile: {trial.error}", code="HRT-4009")
    return trial
