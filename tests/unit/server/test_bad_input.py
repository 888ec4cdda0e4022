"""Everything wrong is a 4xx in OpenAI's shape, before the engine sees it; nothing is a 5xx."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from halogen_core.errors import RequestError
from halogen_core.server.openai_models import Message
from halogen_core.server.validation import template_messages

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return {"messages": HI} | fields


def refused(response, status=400, param=None, code=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "hrt_code"}
    assert error["message"]
    assert error["hrt_code"].startswith("HRT-4")
    assert "detail" not in response.json()
    assert "Traceback" not in response.text
    if param:
        assert error["param"] == param
    if code:
        assert error["code"] == code
    return error


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 10**9),
        ("n", 17),
        ("n", 0),
        ("n", -1),
        ("n", 1.5),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("max_tokens", 10**30),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_completion_tokens", -5),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 1e9),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("seed", 2**64),
        ("seed", "x"),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("top_logprobs", 152_000),
        ("logprobs", 3),
        ("stop", ["x"] * 17),
        ("stop", "x" * 257),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"9999": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "x"),
        ("priority", "highest"),
        ("priority", ""),
        ("priority", 10**9),
        ("user", "x" * 257),
        ("stream", "yes"),
        ("stream_options", True),
        ("model", 5),
        ("messages", []),
        ("messages", "hi"),
        ("messages", None),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": 5, "content": "x"}]),
        ("messages", [{"role": "asistant", "content": "x"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", [{"role": "user", "content": [{"text": "no type"}]}]),
        ("messages", [HI[0]] * 10_001),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "function", "function": {"name": "a b"}}]),
        ("tools", [{"type": "web", "function": {"name": "a"}}]),
        ("tools", [{"type": "function", "function": {"name": "a"}}] * 129),
        ("tools", [{"type": "function", "function": {"name": "a"}}]),
        ("tool_choice", "perhaps"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}),
        ("guided_regex", "((("),
        ("guided_choice", []),
        ("grammar", 'root ::= "a" | nope'),
        ("audio", {"voice": "x"}),
        ("continue_final_message", True),
        ("bad_words", ["x"]),
        ("prompt_logprobs", 0),
        ("typical_p", 0.9),
    ],
)
def test_chat_fields(hello, param, value):
    before = len(hello.engine.requests)
    refused(hello.post(CHAT, chat(**{param: value})), param=param)
    assert len(hello.engine.requests) == before


def test_a_models_own_roles_are_known():
    message = Message(role="ipython", content="x")
    with pytest.raises(RequestError, match="`ipython`; allowed are system"):
        template_messages([message], "{% for m in messages %}{{ m.role }}{% endfor %}")
    template = "{% if message.role == 'ipython' %}{{ message.content }}{% endif %}"
    assert template_messages([message], template) == [{"role": "ipython", "content": "x"}]


def test_an_unknown_priority_is_told_the_labels(hello):
    answer = hello.post(CHAT, chat(priority="highest"))
    refused(answer, param="priority")
    assert "`highest`; allowed are numbers and low, normal, high, urgent" in answer.text


@pytest.mark.parametrize(("label", "number"), [("low", -1), ("urgent", 3), (7, 7), (None, 0)])
def test_priorities_reach_the_engine_as_numbers(hello, label, number):
    assert hello.post(CHAT, chat(priority=label)).status_code == 200
    assert hello.engine.requests[-1].priority == number


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("prompt", None),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [[]]),
        ("prompt", [1, "a"]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", [-1]),
        ("prompt", [10**9]),
        ("prompt", [[1, 2], [260]]),
        ("prompt", ["a"] * 129),
        ("prompt", {"a": 1}),
        ("logprobs", -1),
        ("logprobs", 10**6),
        ("best_of", 2),
        ("suffix", "tail"),
        ("echo", "yes"),
    ],
)
def test_completion_fields(hello, param, value):
    refused(hello.post(COMPLETIONS, {"prompt": "x"} | {param: value}), param=param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"x": ' * 10_000 + b"1" + b"}" * 10_000,
        b'{"messages": [{"role": "user", "content": "x"}], "junk": ' + b"[" * 99_999,
    ],
)
def test_broken_json(hello, body):
    refused(hello.post(CHAT, body), code="invalid_json")


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"x"', b"[" * 100_000])
def test_json_that_is_no_object(hello, body):
    refused(hello.post(CHAT, body))


def test_a_body_without_messages_says_so(hello):
    error = refused(hello.post(CHAT, {"model": "scripted", "prompt": "x"}), param="messages")
    assert "messages" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": None, "n": None, "max_tokens": None, "temperature": None, "user": None},
        {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
        {"unknown_field": {"deep": [1]}, "cache_prompt": False, "top_k": -1},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}, *HI]},
        {"messages": [{"role": "developer", "content": "be brief"}, *HI]},
        {"messages": [*HI, {"role": "tool", "content": "42", "tool_call_id": None}]},
        {"messages": [{"role": "user", "content": "\x00 half \\ud800 <|im_end|>"}]},
        {"continue_final_message": False, "bad_words": [], "typical_p": 1.0, "mirostat": 0},
        {"priority": "high"},
        {"priority": 5},
        {"max_completion_tokens": 3},
    ],
)
def test_what_clients_send_is_accepted(hello, fields):
    response = hello.post(CHAT, chat(**fields))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_over_the_context_names_both_numbers(hello, path):
    for size in (4096, 5000, 3_000_000):
        text = "x" * size
        body = (
            {"prompt": text} if path == COMPLETIONS else chat(messages=[HI[0] | {"content": text}])
        )
        began = time.process_time()
        error = refused(hello.post(path, body), code="context_length_exceeded")
        assert "this model's maximum context length is 4096 tokens" in error["message"]
        if size < 10**6 and path == COMPLETIONS:
            assert str(size) in error["message"]
        assert time.process_time() - began < 2
    fits = hello.post(COMPLETIONS, {"prompt": "x" * 4095, "max_tokens": 50})
    assert fits.json()["usage"]["completion_tokens"] == 1


def test_bodies_over_the_limit_are_refused_before_they_are_read(serve):
    with serve("ok", max_body_size="64KiB") as server:
        big = json.dumps(chat(pad="x" * 70_000)).encode()
        refused(server.post(CHAT, big), 413)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000"
        assert b" 413 " in raw(server, head + b"\r\n\r\n{}")

        def chunks():
            for _ in range(10_000):
                yield b"x" * 6

        with httpx.Client() as client:
            refused(client.post(server.url + CHAT, content=(b"x" * 4096 for _ in range(20))), 413)
            refused(client.post(server.url + CHAT, content=chunks()), 400, code="invalid_json")
        assert server.post(CHAT, chat()).status_code == 200


def test_who_still_sends_a_refused_body_gets_the_answer(serve):
    """The server closes when the rest has come, for closing over it would reset the connection."""
    with serve("ok", max_body_size="1KiB") as server:
        body = b"x" * (8 << 20)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n"
        for how in (f"Content-Length: {len(body)}", "Transfer-Encoding: chunked"):
            data = body if "Length" in how else b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            answer = raw(server, f"{head}{how}\r\n\r\n".encode() + data)
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b'"request_too_large"' in answer


def test_compressed_bodies_are_refused(hello):
    refused(hello.post(CHAT, chat(), headers={"content-encoding": "gzip"}), 415)


def raw(server, data, seconds=60.0):
    """Send bytes, then what comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.settimeout(seconds)
        connection.sendall(data)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received


def test_slow_and_lying_requests_are_cut_off(serve):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    both = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1"
    requests = (
        b"",
        head,
        head + b"Content-Length: 100\r\n\r\n{}",
        head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
        head + both,
        b"\x00\x01\x02 nonsense\r\n\r\n",
    )
    # seconds, so that a busy machine has sent a request before its time is over
    with serve("ok", receive_timeout_s="3") as server:
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(lambda data: raw(server, data), requests))
        nothing, half, lying, chunked, smuggled, nonsense = answers
        assert nothing == half == b""
        assert b" 408 " in lying
        assert b"request_timeout" in lying
        assert b" 408 " in chunked
        assert b" 200 " not in smuggled
        assert b" 400 " in nonsense
        assert server.post(CHAT, chat()).status_code == 200


def test_an_idle_kept_connection_is_closed_and_a_busy_one_is_not(serve):
    with serve("ok", receive_timeout_s="1.5") as server:
        body = json.dumps(chat()).encode()
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (
            CHAT.encode(),
            len(body),
        )
        server.engine.gate.clear()
        began = time.monotonic()
        threading.Timer(2.0, server.engine.gate.set).start()
        answer = raw(server, head + body)
        assert b" 200 " in answer
        assert 2.0 < time.monotonic() - began < 25, "an unused connection is kept for 30 s"


def test_routes_and_methods(hello):
    refused(hello.get("/v1/nothing"), 404, code="not_found")
    refused(hello.get("/%2e%2e/etc/passwd"), 404)
    response = hello.get(CHAT)
    assert response.headers["allow"] == "POST"
    error = refused(response, 405, code="method_not_allowed")
    assert "`GET` is not allowed here, but POST" in error["message"]
    refused(hello.get("/v1/models/..%2F..%2Fetc"), 404, code="model_not_found")
    refused(hello.post(CHAT, chat(model="../../etc\n\x1b[31m")), 404, param="model")


def test_request_ids_are_echoed_when_harmless(hello):
    given = hello.get("/health", headers={"x-request-id": "abc-1.2:3"})
    assert given.headers["x-request-id"] == "abc-1.2:3"
    for bad in ("x" * 200, "a b", "ä".encode()):
        fresh = hello.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert fresh.startswith("req-")
    assert hello.get("/nothing").headers["x-request-id"]


def test_tokenize_and_back(hello):
    text = "hé 🌍"
    tokens = hello.post("/tokenize", {"prompt": text}).json()
    assert tokens["tokens"] == list(text.encode())
    assert tokens["count"] == len(text.encode())
    assert tokens["max_model_len"] == 4096
    assert hello.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"] == text
    assert hello.post("/tokenize", {"messages": HI}).json()["tokens"][0] == 259
    refused(hello.post("/tokenize", {}), param="prompt")
    refused(hello.post("/detokenize", {"tokens": [-1]}), param="tokens")
    refused(hello.post("/detokenize", {"tokens": [260]}), param="tokens")
    refused(hello.post("/detokenize", {}), param="tokens")
