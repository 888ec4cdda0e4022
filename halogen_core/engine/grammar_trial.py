"""A process that compiles grammars on trial: `python -m halogen_core.engine.grammar_trial FD`.

Sixty characters can keep llguidance busy for hours or ask it for all memory, and nothing stops a
thread that compiles. So every grammar is compiled here first, under limits of the operating
system: one that goes beyond them ends this process, and nothing else.
"""

from __future__ import annotations

import contextlib
import math
import resource
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from halogen_core.engine import wire
from halogen_core.engine.grammar_compiler import Vocabulary, compile_grammar, open_words

if TYPE_CHECKING:
    import llguidance

MAX_SECONDS = 2
"""Of processor time for one grammar; the system ends it up to a second later."""
MAX_MEMORY = 128 << 20
"""Bytes that one grammar may add."""


class Asked(msgspec.Struct, frozen=True):
    """A grammar in llguidance's notation, or as somebody wrote it: Lark or llama.cpp's GBNF."""

    text: str
    written: bool = False


class Trial(msgspec.Struct, frozen=True):
    """How it went: the grammar in llguidance's notation, or what is wrong with it."""

    source: str
    error: str
    seconds: float
    """Of processor time."""


def serve(connection: socket.socket) -> None:
    """Answer each grammar, the vocabulary first, until the other side is gone."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sent = wire.receive_body(connection)
    if sent is None:
        return
    vocabulary = msgspec.msgpack.decode(sent, type=Vocabulary)
    words = open_words(vocabulary, lambda text: _split(vocabulary, text))
    compile_grammar(words, "start: /a/")  # what is made once belongs to no grammar
    while (sent := wire.receive_body(connection)) is not None:
        asked = msgspec.msgpack.decode(sent, type=Asked)
        _limit()
        connection.sendall(wire.frame(_try_out(words, asked)))


def _try_out(words: llguidance.LLTokenizer, asked: Asked) -> Trial:
    began, source = time.process_time(), ""
    try:
        source = _converted(asked.text) if asked.written else asked.text
        found = compile_grammar(words, source)
        error = found if isinstance(found, str) else ""
    except RecursionError:
        error = "it is nested too deeply"
    except MemoryError:
        error = f"it takes more than {MAX_MEMORY >> 20} MiB to compile"
    except BaseException as exc:  # llguidance's panics are no `Exception`
        what = "the compiler failed" if source else "it is neither Lark nor GBNF"
        error = f"{what}: {str(exc)[:200]}"
    seconds = time.process_time() - began
    if seconds > MAX_SECONDS and not error:
        error = f"it takes {seconds:.1f} s to compile, {MAX_SECONDS} s are allowed"
    return Trial(source, error, seconds)


def _converted(text: str) -> str:
    """Lark or GBNF in llguidance's notation; raises bare Exceptions."""
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark

    return llguidance.LLMatcher.grammar_from_lark(any_to_lark(text))


def _limit() -> None:
    """Let the next grammar have its share of time and memory, and no more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _allow(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + MAX_SECONDS))
    with contextlib.suppress(OSError):  # where there is no such file there is no such limit either
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _allow(resource.RLIMIT_AS, pages * resource.getpagesize() + MAX_MEMORY)


def _allow(kind: int, most: int) -> None:
    """Set a limit, within what the one who started us may have."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _split(vocabulary: Vocabulary, text: str) -> list[int]:
    """Text as tokens of a byte; whether a grammar compiles does not depend on it."""
    single = {token: at for at, token in enumerate(vocabulary.tokens) if len(token) == 1}
    return [single[byte] for at in text.encode() if (byte := bytes((at,))) in single]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
