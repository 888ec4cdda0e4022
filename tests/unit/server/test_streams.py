"""Streams: their grammar, equal to whole answers at every cut, and ended when nobody listens."""

import asyncio
import json
import random
import socket

import httpx
import pytest

from halogen_core.server.generation import MAX_PENDING

from .conftest import wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TEXTS = [
    "plain words, and more of them",
    "👩‍👩‍👧 family 🏳️‍🌈 flag 🇫🇷",
    "你好，世界。人工智能很有意思",
    "สวัสดีชาวโลก ภาษาไทย",
    'mixed: é ü 한국어 ✓ \u2028 \x00 \\ " end',
]


def events(response):
    """The events of a stream; checks that it is server-sent events and nothing else."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    blocks = response.content.decode("utf-8").split("\n\n")
    assert blocks.pop() == ""
    blocks = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block[len("data: ") :]) for block in blocks]


def check_grammar(chunks, choices=1, include_usage=False):
    """Per choice: the role, then content, then one empty chunk with a reason; usage at the end."""
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] > 0
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}) == 1
    texts = []
    for index in range(choices):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert all("finish_reason" in c for c in mine)
        first, *middle, end = mine
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert first["finish_reason"] is None
        assert all(set(c["delta"]) == {"content"} and c["finish_reason"] is None for c in middle)
        assert end["delta"] == {}
        assert end["finish_reason"] in ("stop", "length")
        texts.append(("".join(c["delta"]["content"] for c in middle), end["finish_reason"]))
    return texts


@pytest.fixture(scope="module")
def echo(serve):
    """Answers with the content of the last message or with the prompt."""

    def script(request):
        ids = request.prompt_token_ids
        if ids[0] == 259:
            body = bytes(i for i in ids[1 : ids.index(256)] if i < 256)
            return list(body.partition(b":")[2])
        return list(ids)

    with serve(script) as server:
        yield server


def ask(server, text, *, stream, **fields):
    body = {"messages": [{"role": "user", "content": text}], "stream": stream} | fields
    response = server.post(CHAT, body)
    if stream:
        ((shown, reason),) = check_grammar(events(response))
        return shown, reason
    choice = response.json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_equals_the_whole_answer(echo, text):
    assert ask(echo, text, stream=False) == (text, "stop")
    assert ask(echo, text, stream=True) == (text, "stop")


def test_cut_at_every_length_it_is_valid_text(echo):
    text = "a🌍é你"
    for length in range(1, len(text.encode()) + 1):
        whole = ask(echo, text, stream=False, max_tokens=length)
        assert whole == ask(echo, text, stream=True, max_tokens=length)
        assert whole[0] == text.encode()[:length].decode("utf-8", "replace")
        assert whole[1] == "length"


def expected(text, stops):
    """What is left of a text that stops at the first complete stop string."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    return (text[: min(ends)[1]], "stop") if ends else (text, "stop")


@pytest.mark.parametrize("stop", ["DEFGHIJ", "世", "🌍", "\n\n", "é end"])
def test_a_stop_string_split_at_every_token_leaks_nothing(echo, stop):
    text = f"abc{stop}tail" if stop != "é end" else "abc é end tail"
    stops = [stop]
    for stream in (False, True):
        assert ask(echo, text, stream=stream, stop=stop) == expected(text, stops)


def test_random_texts_and_stops_stream_as_they_are_whole(echo):
    rng = random.Random(7)
    for _ in range(60):
        text = "".join(rng.choices("ab?\n 世🌍", k=rng.randint(1, 24)))
        stops = [
            "".join(rng.choices("ab?\n 世", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))
        ]
        whole = ask(echo, text, stream=False, stop=stops)
        assert whole == ask(echo, text, stream=True, stop=stops)
        assert whole == expected(text, stops)


def test_completions_stream_as_they_are_whole_with_stops(echo):
    for prompt, stop in (("aab?\nx", ["?\n"]), ("aaab ab", ["aab", "ab"]), ("tail?", ["?\n"])):
        fields = {"prompt": prompt, "stop": stop, "max_tokens": 50}
        whole = echo.post(COMPLETIONS, fields).json()["choices"][0]
        chunks = events(echo.post(COMPLETIONS, fields | {"stream": True}))
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"]
        assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == whole["finish_reason"]
        assert whole["text"] == expected(prompt, stop)[0]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("choices", [1, 3])
def test_grammar(echo, choices, include_usage):
    options = {"include_usage": include_usage}
    body = {"messages": HI, "stream": True, "n": choices, "stream_options": options}
    texts = check_grammar(events(echo.post(CHAT, body)), choices, include_usage)
    assert texts == [("hi", "stop")] * choices


def test_continuous_usage_counts_up(echo):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HI, "stream": True, "stream_options": options}
    counts = [c["usage"]["completion_tokens"] for c in events(echo.post(CHAT, body))]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def stalled_until(server, steps):
    """Let the server look away until the engine has done so many steps."""
    server.loop.call_soon_threadsafe(wait_for, lambda: server.engine.steps >= steps)


def test_running_usage_counts_what_was_sent_even_after_a_stall(serve):
    def script(_request):
        stalled_until(server, 9)
        return b"eight..."

    with serve(script) as server:
        options = {"continuous_usage_stats": True}
        body = {"messages": HI, "stream": True, "stream_options": options}
        chunks = events(server.post(CHAT, body))
        counts = [c["usage"]["completion_tokens"] for c in chunks if c["choices"][0]["delta"]]
        assert counts == [0, *range(1, 9)]
        assert chunks[-1]["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("stream", [False, True])
def test_a_stall_of_the_server_costs_no_client_its_answer(serve, stream):
    """All that came meanwhile is more than a client may lag behind, and it did not lag."""

    def script(_request):
        stalled_until(server, 3 * MAX_PENDING)
        return b"x" * 3 * MAX_PENDING

    with serve(script, info_context=100_000) as server:
        shown, reason = ask(server, "hi", stream=stream, n=1)
        assert (len(shown), reason) == (3 * MAX_PENDING, "stop")


def test_ignore_eos_gives_exactly_max_tokens(echo):
    body = {"messages": HI, "ignore_eos": True, "max_tokens": 77, "stop": None}
    answer = echo.post(CHAT, body).json()
    assert answer["usage"]["completion_tokens"] == 77
    assert answer["choices"][0]["finish_reason"] == "length"


def test_sampling_reaches_the_engine(echo):
    body = {
        "messages": HI,
        "n": 2,
        "seed": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "logit_bias": {"7": -3.5},
        "min_tokens": 1,
        "stop_token_ids": [9],
        "session_id": "s",
        "user": "u",
        "priority": "high",
        "cache_prompt": False,
        "cache_salt": "x",
    }
    assert echo.post(CHAT, body).status_code == 200
    first, second = echo.engine.requests[-2:]
    assert (first.sampling.seed, second.sampling.seed) == (5, 6)
    assert first.sampling.temperature == 0.5
    assert first.sampling.top_k == 0
    assert first.sampling.logit_bias == {7: -3.5}
    assert (first.min_tokens, first.stop_token_ids, first.priority) == (1, [9], 1)
    assert (first.session, first.cache_salt, first.use_prefix_cache) == ("s", "x", False)


def test_echo_with_logprobs_puts_the_tokens_together(echo):
    prompts = ["héllo", list("🌍 x".encode()), "a"]
    body = {"prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2}
    answer = echo.post(COMPLETIONS, body).json()
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    for choice in answer["choices"]:
        rows = choice["logprobs"]
        assert "".join(rows["tokens"]) == choice["text"]
        for offset, token in zip(rows["text_offset"], rows["tokens"], strict=True):
            assert choice["text"][offset : offset + len(token)] == token
        assert rows["token_logprobs"][0] is None
        assert all(value is not None for value in rows["token_logprobs"][1:])
        assert len(rows["token_logprobs"]) == len(rows["top_logprobs"]) == len(rows["tokens"])
    stream = events(echo.post(COMPLETIONS, body | {"prompt": "héllo", "n": 1, "stream": True}))
    assert "".join(c["choices"][0]["text"] for c in stream) == answer["choices"][0]["text"]


def test_scoring_a_prompt_generates_nothing(echo):
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = echo.post(COMPLETIONS, body).json()
    assert answer["choices"][0]["text"] == "abc"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 3
    assert answer["usage"]["completion_tokens"] == 0


def test_pings_before_the_first_token_and_between(serve):
    with serve("late", sse_ping_s="0.1") as server:
        server.engine.gate.clear()
        with httpx.Client(timeout=60).stream(
            "POST", server.url + CHAT, json={"messages": HI, "stream": True}
        ) as response:
            lines = response.iter_lines()
            seen = [next(lines) for _ in range(6)]
            assert any(line.startswith(": ping") for line in seen)
            server.engine.gate.set()
            rest = list(lines)
        assert "data: [DONE]" in rest


def open_raw(server, body, path=CHAT):
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_client_that_leaves_ends_its_sequences(serve, stream, phase):
    with serve("x" * 4000, engine_options={"pause_s": 0.01}) as server:
        if phase == "prefill":
            server.engine.gate.clear()
        body = {"messages": HI, "stream": stream, "n": 3}
        connection = open_raw(server, body)
        wait_for(lambda: len(server.engine.running) == 3)
        if phase == "decode":
            wait_for(lambda: server.engine.steps > 5)
            server.engine.gate.clear()
        connection.close()
        wait_for(lambda: len(server.engine.aborted) == 3)
        wait_for(lambda: server.service.admission.inside == 0)
        text = server.get("/metrics").text
        assert f'halogen_requests_cancelled_total{{phase="{phase}"}} 3.0' in text


def test_a_client_that_leaves_while_its_prompt_is_read(serve):
    with serve("x") as server:
        data = b'{"messages": ['
        connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
        connection.sendall(b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: x\r\n")
        connection.sendall(b"Content-Length: 500\r\n\r\n" + data)
        connection.close()
        assert server.post(CHAT, {"messages": HI}).status_code == 200
        assert len(server.engine.requests) == 1


def test_a_client_that_does_not_read_is_cut_off_and_others_go_on(serve):
    with serve("x" * 20000, send_timeout_s="0.5", info_context=200_000) as server:
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        data = json.dumps({"messages": HI, "stream": True, "n": 4, "logprobs": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        lazy.sendall(head.encode() + data)
        wait_for(lambda: len(server.engine.running) == 4)
        assert server.post(CHAT, {"messages": HI, "max_tokens": 5}).status_code == 200
        wait_for(lambda: server.service.admission.inside == 0)
        text = server.get("/metrics").text
        assert 'halogen_requests_cancelled_total{phase="decode"} 4.0' in text
        assert "halogen_errors_total{" not in text
        lazy.close()


def test_many_clients_with_random_cancels_leave_nothing_behind(serve):
    rng = random.Random(3)
    with serve("y" * 300, engine_options={"pause_s": 0.001}) as server:

        async def one(client, i):
            body = {"messages": HI, "stream": i % 3 != 0, "n": 1 + i % 2}
            try:
                async with asyncio.timeout(rng.choice([0.01, 0.05, 0.1, 200, 200])):
                    async with client.stream("POST", server.url + CHAT, json=body) as response:
                        return len(await response.aread()) > 0
            except TimeoutError:
                return False

        async def main():
            limits = httpx.Limits(max_connections=32)
            async with httpx.AsyncClient(timeout=None, limits=limits) as client:
                return await asyncio.gather(*(one(client, i) for i in range(96)))

        done = asyncio.run(main())
        assert any(done)
        assert not all(done)
        wait_for(lambda: not server.engine.running)
        wait_for(lambda: server.service.admission.inside == 0)
        assert server.get("/ready").json()["running"] == 0
