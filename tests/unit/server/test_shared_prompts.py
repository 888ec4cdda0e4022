"""A long prompt of several answers is computed once: the others wait until it is cached."""

import concurrent.futures
import time

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "word " * 60  # a token for each letter
SHORT = "word"


def submitted(server, path, body, count):
    """How many sequences the engine has while it does nothing, of `count`; all are answered."""
    engine = server.engine
    engine.requests.clear()
    engine.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        answer = thread.submit(server.post, path, body)
        until = time.monotonic() + 30
        while not engine.requests and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(0.1)  # for those that should not come
        found = len(engine.requests)
        engine.gate.set()
        choices = answer.result().json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(count))
    assert len(engine.requests) == count
    return found


def chat(text, **fields):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4} | fields


@pytest.fixture(scope="module")
def server(serve):
    with serve("answer") as server:
        yield server


def test_answers_wait_for_the_first_ones_prompt(server):
    assert submitted(server, CHAT, chat(LONG, n=4), 4) == 1
    two = {"prompt": [LONG, LONG + "x"], "n": 3, "max_tokens": 4}
    assert submitted(server, TEXT, two, 6) == 2, "one of each prompt"


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        (CHAT, chat(SHORT, n=4), 4),
        (CHAT, chat(LONG, n=4, cache_prompt=False), 4),
        (TEXT, {"prompt": LONG, "n": 3, "max_tokens": 4, "echo": True, "logprobs": 1}, 3),
        (TEXT, {"prompt": [LONG, LONG], "max_tokens": 4}, 2),
    ],
    ids=["short", "uncached", "prompt's log-probabilities", "prompts by themselves"],
)
def test_where_nothing_is_gained_nobody_waits(server, path, body, count):
    assert submitted(server, path, body, count) == count


def test_without_a_prefix_cache_nobody_waits(serve):
    with serve("answer", prefix_cache="off") as server:
        assert submitted(server, CHAT, chat(LONG, n=3), 3) == 3


def test_who_waits_is_answered_when_the_first_fails(serve):
    with serve(lambda request: [RuntimeError("broken")]) as server:
        response = server.post(CHAT, chat(LONG, n=3))
        assert response.status_code in (500, 503)
        assert server.service.admission.inside == 0
