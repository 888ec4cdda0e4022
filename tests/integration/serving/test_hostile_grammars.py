"""Grammars made to hurt: nobody but who sent them waits."""

import concurrent.futures
import time

import pytest

HI = [{"role": "user", "content": "Say hello."}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served(serve_process):
    server = serve_process()
    yield server
    assert server.stop() == 0


def test_a_server_answers_others_while_grammars_are_refused(served):
    def hostile(i):
        text = f"start: T\nT: ~/(.*a.{{40}}b.*)/ & /[ab]{{{100 + i}}}/"
        return served.client.post(
            CHAT, json={"messages": HI, "max_tokens": 4, "guided_grammar": text}
        ).status_code

    engine = served.status()["engine"]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(hostile, i) for i in range(4)]
        while not all(task.done() for task in waiting):
            began = time.monotonic()
            assert served.chat().status_code == 200
            assert time.monotonic() - began < 20
        assert {task.result() for task in waiting} == {400}
    assert served.chat(json_schema={"type": "boolean"}).status_code == 200
    assert served.status()["engine"] == engine
    assert "engine hangs" not in "".join(served.lines)
