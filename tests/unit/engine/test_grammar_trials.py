"""Grammars that would never finish compiling cost a process, and nobody's answer."""

import asyncio
import os
import resource
import signal
import string
import threading
import time

import llguidance
import psutil
import pytest

from halogen_core.engine import grammar_trials
from halogen_core.engine.grammar_trial import Asked
from halogen_core.engine.grammar_trials import GrammarTrials
from halogen_core.errors import Overloaded, RequestError, Transient
from halogen_core.loader import Tokenizer
from halogen_core.loader.tokenizer import TokenKind


def tokenizer():
    letters = list(string.ascii_lowercase + string.digits)
    return Tokenizer(
        build=lambda: None,
        pieces=[*letters, "<end>"],
        kinds=[TokenKind.NORMAL] * len(letters) + [TokenKind.CONTROL],
        byte_level=False,
        end_token_ids=frozenset([len(letters)]),
    )


def lark(text):
    return Asked(llguidance.LLMatcher.grammar_from_lark(text))


GOOD = lark("start: /[a-c]+/")
ENDLESS = lark("start: T\nT: ~/(.*a.{15}b.*)/ & /[ab]{100}/")
"""Minutes; with 40 for 15 it takes all memory."""


LONG = "\n".join(f'r{i} ::= r{i + 1} "a"' for i in range(9000)) + '\nr9000 ::= "b"\nroot ::= r0'
"""The converter from GBNF takes a minute for this."""


@pytest.fixture
def trials():
    made = GrammarTrials(tokenizer)
    yield made
    process = made._process
    made.close()
    assert process is None or not psutil.pid_exists(process.pid)


def refused(trials, asked):
    with pytest.raises(RequestError) as error:
        trials.try_out(asked)
    assert error.value.code == "HRT-4009"
    return error.value.message


def test_a_good_one_passes_and_is_remembered(trials):
    first = trials.try_out(GOOD)
    assert (first.source, first.error) == (GOOD.text, "")
    assert trials.try_out(GOOD).seconds == 0
    assert "no text" in refused(trials, lark("start: start"))


def test_one_that_does_not_end_is_ended_and_the_next_one_tried(trials):
    began = time.process_time()
    assert "takes more than" in refused(trials, ENDLESS)
    assert time.process_time() - began < 2, "the time is the other process's"
    ended = trials._process
    assert ended is None
    assert "takes more than" in refused(trials, ENDLESS), "it is not tried again"
    assert trials._process is None
    assert trials.try_out(GOOD).error == ""


@pytest.mark.parametrize(
    "asked",
    [
        lark("start: T\nT: ~/(.*a.{40}b.*)/ & /[ab]{100}/"),
        Asked(
            llguidance.LLMatcher.grammar_from_json_schema('{"type":"integer","multipleOf":9999991}')
        ),
        Asked(LONG, written=True),
    ],
    ids=["memory", "a large multiple", "rules that are long to convert"],
)
def test_time_and_memory_are_bounded(trials, asked):
    assert "takes" in refused(trials, asked)


@pytest.mark.parametrize(
    ("text", "words"),
    [("%%%", "neither Lark nor GBNF"), ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "deeply")],
)
def test_what_people_write_is_converted_there(trials, text, words):
    assert words in refused(trials, Asked(text, written=True))
    found = trials.try_out(Asked('root ::= "a" [b-c]', written=True))
    assert trials.try_out(Asked(found.source)).error == ""


def test_a_process_lost_for_no_reason_of_the_grammars_is_started_again(trials):
    trials.try_out(GOOD)
    os.kill(trials._process.pid, signal.SIGKILL)
    with pytest.raises(Transient):
        trials.try_out(lark('start: "b"'))
    assert trials.try_out(lark('start: "b"')).error == ""


def test_a_user_with_limits_of_their_own_has_grammars_too(trials):
    """`ulimit -t` and `ulimit -v` of the shell that started the server."""
    before = resource.getrlimit(resource.RLIMIT_CPU)
    trials.try_out(GOOD)
    resource.prlimit(trials._process.pid, resource.RLIMIT_CPU, (100, 100))
    resource.prlimit(trials._process.pid, resource.RLIMIT_AS, (4 << 30, 4 << 30))
    assert trials.try_out(lark('start: "b"')).error == ""
    assert resource.getrlimit(resource.RLIMIT_CPU) == before


def test_few_may_wait_and_known_ones_need_not(trials, monkeypatch):
    monkeypatch.setattr(grammar_trials, "MAX_WAITING", 2)
    trials.try_out(GOOD)
    gate = threading.Event()
    monkeypatch.setattr(trials, "_ask", lambda asked, ask=trials._ask: gate.wait() and ask(asked))

    async def main():
        waiting = [asyncio.create_task(trials.check(lark(f'start: "{c}"'))) for c in "ab"]
        await asyncio.sleep(0)
        assert (await trials.check(GOOD)).error == ""
        with pytest.raises(Overloaded):
            await trials.check(lark('start: "c"'))
        gate.set()
        assert [trial.error for trial in await asyncio.gather(*waiting)] == ["", ""]
        assert (await trials.check(lark('start: "c"'))).error == ""

    asyncio.run(main())


def test_closing_answers_who_waits():
    trials = GrammarTrials(tokenizer)
    trials.try_out(GOOD)

    async def main():
        waiting = asyncio.create_task(trials.check(ENDLESS))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(trials.close)
        with pytest.raises((Transient, RequestError)):
            await waiting

    asyncio.run(main())
