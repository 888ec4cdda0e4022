"""`halogen run` as users type it, on a real model."""

import asyncio
import contextlib
import json
import os
import pty
import re
import select
import signal
import sys
import time

import pytest
from click.testing import CliRunner

from halogen_core.cli.assembly import assemble
from halogen_core.cli.chat_session import Ask, Session, load_engine
from halogen_core.cli.main import main
from halogen_core.config import resolve
from halogen_core.engine.protocol import SamplingParams
from halogen_core.errors import RequestError
from halogen_core.server.openai_models import CompletionBody
from halogen_core.server.validation import decode

FLAGS = ("--backend", "cpu_reference", "--threads", "1", "--pool-size", "16MiB")
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def run(tiny_path, tmp_path_factory):
    """`halogen run` in this process; its standard input is `text`."""
    folder = tmp_path_factory.mktemp("cache")

    def go(*arguments, text=None, model=tiny_path):
        flags = ("--model", str(model), "--cache-dir", str(folder), *FLAGS)
        return CliRunner().invoke(main, ["run", *flags, *arguments], input=text)

    return go


@pytest.mark.slow
def test_a_real_model_answers(run, smollm2_path):
    flags = ("--max-context", "256", "--greedy", "--max-tokens", "12")
    report = json.loads(run(*flags, "--json", QUESTION, model=smollm2_path).stdout)
    assert "Paris" in report["text"]
    assert report["prompt_token_ids"][0] != report["prompt_token_ids"][1]


def test_one_shot_and_json_tell_the_same(run):
    flags = ("--greedy", "--max-tokens", "16")
    report = json.loads(run(*flags, "--json", QUESTION).stdout)
    assert report["finish_reason"] in ("stop", "length")
    assert report["backend"] == "cpu_reference"
    assert len(report["token_ids"]) == 16
    assert len(report["prompt_token_ids"]) > len(QUESTION)
    assert report["placement"]
    assert set(report["timings"]) == {"ttft_s", "prefill_tok_s", "decode_tok_s"}
    assert all(value > 0 for value in report["timings"].values())
    plain = run(*flags, QUESTION)
    assert plain.exit_code == 0
    assert plain.stdout == report["text"] + "\n"
    assert run(*flags, text=QUESTION).stdout == plain.stdout


def test_a_model_without_chat_template_says_so(run):
    """On standard error, and not where the template plays no part."""
    flags = ("--greedy", "--max-tokens", "2", "hi")
    assert "no chat template; ChatML is assumed" in run(*flags).stderr
    assert "ChatML" not in run("--raw", *flags).stderr
    assert json.loads(run("--json", *flags).stdout)["token_ids"]


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("--scheduling-policy", ("fcfs", "priority", "shortest", "fair")),
        ("--eviction-policy", ("lru", "session_priority+lru", "cheapest_loss")),
    ],
)
def test_an_unknown_policy_is_refused_with_those_there_are(run, flag, names):
    done = run(flag, "no_such", "x")
    assert done.exit_code == 2
    assert "is `no_such`; there are" in done.stderr
    assert all(name in done.stderr for name in names)


def test_raw_system_and_seed_change_what_they_should(run):
    def report(*flags):
        return json.loads(run("--json", "--max-tokens", "8", *flags, "hi").stdout)

    raw, chat = report("--raw", "--greedy"), report("--greedy")
    assert raw["prompt_token_ids"] == list(b"hi")
    assert bytes(i for i in chat["prompt_token_ids"] if i < 256).startswith(b"user\nhi")
    system = report("--greedy", "--system", "ok")
    assert bytes(i for i in system["prompt_token_ids"] if i < 256).startswith(b"system\nok\nuser")
    hot = ("--temperature", "2", "--top-p", "0.95")
    assert report("--seed", "3", *hot)["token_ids"] == report("--seed", "3", *hot)["token_ids"]
    assert report("--seed", "3", *hot)["token_ids"] != report("--seed", "4", *hot)["token_ids"]


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--greedy", "--temperature", "1", "x"), "HRT-1003"),
        (("--raw", "--system", "s", "x"), "HRT-1003"),
        (("--json",), "HRT-4003"),
        (("",), "HRT-4003"),
        ((" \n",), "HRT-4003"),
        ((), "HRT-4003"),
        (("--temperature", "100.5", "x"), "HRT-1002"),
        (("--temperature", "nan", "x"), "HRT-1002"),
        (("--temperature", "-1", "x"), "HRT-1002"),
        (("--top-p", "0", "x"), "HRT-1002"),
        (("--top-p", "nan", "x"), "HRT-1002"),
        (("--seed", str(2**63), "x"), "HRT-1002"),
        (("--seed", "1.5", "x"), "HRT-1002"),
        (("--backend", "no_such", "x"), "HRT-1107"),
        (("--model", "no-such-model", "x"), "HRT-2301"),
        (("--max-context", "64", "word " * 40), "HRT-4004"),
        (("--max-context", "99999", "x"), "HRT-5033"),
        (("--pool-size", "4X", "x"), "HRT-1002"),
        (("--kv-cache-ratio", "0.5", "x"), "HRT-1003"),
    ],
)
def test_what_is_wrong_is_said_with_a_code(run, flags, code):
    done = run(*flags)
    assert done.exit_code == 2
    assert f"[{code}]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (-1e-9, 0, 9, 100, 100.5)),
        *(("top_p", v) for v in (0, 1e-6, 1, 1.01)),
        *(("seed", v) for v in (-(2**63) - 1, -(2**63), 2**63 - 1, 2**63)),
    ],
)
def test_a_flag_and_a_field_of_a_request_take_the_same_values(run, field, value):
    """`--temperature 9` and `"temperature": 9`: both or neither."""
    try:
        decode(CompletionBody, json.dumps({"prompt": "x", field: value}).encode())
        served = True
    except RequestError:
        served = False
    done = run("--" + field.replace("_", "-"), str(value), "--max-tokens", "1", "x")
    assert (done.exit_code == 0) == served, done.stderr


def test_a_session_remembers_even_an_interrupted_answer(tiny_path, tmp_path):
    flags = {"model": str(tiny_path), "backend": "cpu_reference", "cache_dir": str(tmp_path)}
    parts = assemble(resolve(flags | {"pool_size": "16MiB"}, environment={}))
    ask = Ask(sampling=SamplingParams(temperature=0.0), max_tokens=10)
    engine = load_engine(parts)

    async def main():
        session = await Session.open(engine, parts.tokenizer, ask, "be brief")
        first = await session.answer("one", lambda _text: None)

        def stop(_text):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            await session.answer("two", stop)
        third = await session.answer("three", lambda _text: None)
        stats = await session.engine.stats()
        await session.close()
        return session, first, third, stats

    session, first, third, stats = asyncio.run(main())
    roles = [message["role"] for message in session.history]
    assert roles == ["system", *["user", "assistant"] * 3]
    assert session.history[2]["content"] == first.text
    cut = session.history[4]["content"]
    assert len(cut) < len(first.text)
    assert len(third.prompt_token_ids) > 2 * len(first.prompt_token_ids)
    assert (stats.running, stats.blocks_active) == (0, 0)


class Terminal:
    """A `halogen run` chat in a terminal."""

    def __init__(self, model, folder, *flags):
        command = [sys.executable, "-m", "halogen_core.cli", "run", "--model", str(model)]
        command += ["--cache-dir", str(folder)]
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            # a test run started in the background inherits an ignored SIGINT; a terminal never does
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.environ["TERM"] = "dumb"
            os.execv(sys.executable, [*command, *FLAGS, *flags])
        self.seen = ""

    def read_until(self, pattern, seconds=120):
        until, start = time.monotonic() + seconds, len(self.seen)
        while not re.search(pattern, self.seen[start:]):
            assert time.monotonic() < until, self.seen[-3000:]
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 4096).decode("utf-8", "replace")
                except OSError:
                    break
        return self.seen[start:]

    def interrupt(self):
        """Ctrl-C; a random model may have ended its answer just before, so that the prompt gets
        it, and readline may miss one that comes while it draws the prompt."""
        for _ in range(5):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.read_until(r"(\[stopped\]|Ctrl-D leaves)[\s\S]*\n> ", seconds=8)
        raise AssertionError(self.seen)

    def type(self, text):
        os.write(self.fd, text.encode())

    def leave(self, seconds=120):
        """End of file until the program ends: typed too early, the terminal swallows it."""
        until = time.monotonic() + seconds
        while (done := os.waitpid(self.pid, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < until, self.seen
            self.type("\x04")
            time.sleep(0.2)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(done[1])


@pytest.fixture
def terminal(tiny_path, tmp_path):
    terminal = Terminal(tiny_path, tmp_path, "--greedy", "--max-tokens", "900")
    yield terminal
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(terminal.pid, signal.SIGKILL)
        os.waitpid(terminal.pid, 0)


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal):
    terminal.read_until(r"> ")
    stopped = 0
    for question in ("first", "second", "third", "fourth", "fifth", "sixth"):
        terminal.type(question + "\n")
        terminal.read_until(question + r"\r\n[\s\S]{5}")
        stopped += "[stopped]" in terminal.interrupt()
        if stopped == 2:
            break
    assert stopped == 2, terminal.seen
    assert terminal.leave() == 0
