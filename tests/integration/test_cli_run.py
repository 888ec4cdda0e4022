"""`halogen run` as users type it, on a real model."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

COMMAND = (sys.executable, "-m", "halogen_core.cli", "run")
FLAGS = ("--max-context", "512", "--pool-size", "32MiB", "--backend", "cpu_reference")


@pytest.fixture(scope="module")
def run(smollm2_path, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")

    def go(*arguments, text=None, check=True):
        command = [*COMMAND, "--model", str(smollm2_path), "--cache-dir", str(cache), *FLAGS]
        done = subprocess.run(
            [*command, *arguments],
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    go.model, go.cache = smollm2_path, cache
    return go


def test_one_shot_answers_and_json_says_how(run):
    question = "What is the capital of France?"
    plain = run("--greedy", "--max-tokens", "16", question)
    assert "Paris" in plain.stdout
    report = json.loads(run("--greedy", "--max-tokens", "16", "--json", question).stdout)
    assert report["text"] == plain.stdout.removesuffix("\n")
    assert report["finish_reason"] in ("stop", "length")
    assert report["backend"] == "cpu_reference"
    assert len(report["token_ids"]) <= 16
    assert len(report["prompt_token_ids"]) > 10
    assert report["placement"]
    assert set(report["timings"]) == {"ttft_s", "prefill_tok_s", "decode_tok_s"}
    assert all(value > 0 for value in report["timings"].values())


def test_raw_system_and_seed_change_what_they_should(run):
    def ids(*flags):
        report = run("--json", "--max-tokens", "6", *flags, "One, two, three,")
        return json.loads(report.stdout)

    raw = ids("--raw", "--greedy")
    assert "four" in raw["text"]
    chat, system = ids("--greedy"), ids("--greedy", "--system", "Answer in French.")
    assert len(raw["prompt_token_ids"]) < len(chat["prompt_token_ids"])
    assert chat["prompt_token_ids"] != system["prompt_token_ids"]
    assert ids("--seed", "3")["token_ids"] == ids("--seed", "3")["token_ids"]


def test_a_prompt_from_a_pipe(run):
    assert run("--greedy", "--max-tokens", "4", text="Say hello.").stdout.strip()


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--greedy", "--temperature", "1", "x"), "HRT-1003"),
        (("--raw", "--system", "s", "x"), "HRT-1003"),
        (("--backend", "no_such", "x"), "HRT-1107"),
        (("--model", "no-such-model", "x"), "HRT-2301"),
        (("--max-context", "16", "word " * 40), "HRT-4004"),
        (("--pool-size", "4X", "x"), "HRT-1002"),
        (("--pool-size", "1G", "--kv-cache-ratio", "0.5", "x"), "HRT-1003"),
    ],
)
def test_what_is_wrong_is_said_with_a_code(run, flags, code):
    done = run(*flags, check=False)
    assert done.returncode == 2
    assert f"[{code}]" in done.stderr
    assert "fix:" in done.stderr or code == "HRT-4004"
    assert "Traceback" not in done.stderr


class Terminal:
    """A `halogen run` chat in a terminal."""

    def __init__(self, run, *flags):
        command = [*COMMAND, "--model", str(run.model), "--cache-dir", str(run.cache)]
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"
            os.execv(sys.executable, [*command, *FLAGS, *flags])
        self.seen = ""

    def read_until(self, pattern, seconds=60):
        until, start = time.monotonic() + seconds, len(self.seen)
        while not re.search(pattern, self.seen[start:]):
            assert time.monotonic() < until, self.seen
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 4096).decode("utf-8", "replace")
                except OSError:
                    break
        return self.seen[start:]

    def type(self, text):
        os.write(self.fd, text.encode())

    def wait(self):
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


def test_a_chat_remembers_and_ctrl_c_stops_only_the_answer(run):
    terminal = Terminal(run, "--greedy", "--max-tokens", "400")
    terminal.read_until(r"> ")
    terminal.type("My name is Alice. Write a very long story about the sea.\n")
    terminal.read_until(r"sea\.\r\n.*\w+ \w+ \w+")
    terminal.type("\x03")
    terminal.read_until(r"\[stopped\][\s\S]*> ")
    terminal.type("\x03")
    terminal.read_until(r"Ctrl-D leaves[\s\S]*> ")
    terminal.type("What is my name?\n")
    assert "Alice" in terminal.read_until(r"name\?\r\n[\s\S]*\n> ")
    terminal.type("\x04")
    assert terminal.wait() == 0
