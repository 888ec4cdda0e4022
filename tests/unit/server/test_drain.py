"""Shutting down: running answers end and reach who asked, new requests are refused, with an end."""

import json
import socket
import threading
import time

import httpx

from halogen_core.server.serving import LAST_BYTES_S

from .conftest import wait_for

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def test_drain_ends_running_streams_and_refuses_new_requests(serve):
    with serve("z" * 300, engine_options={"pause_s": 0.05}) as server:
        finished = []
        server.engine.gate.clear()

        def stream():
            with httpx.stream(
                "POST", server.url + CHAT, json=HI | {"stream": True}, timeout=60
            ) as r:
                finished.append(r.read().endswith(b"data: [DONE]\n\n"))

        threads = [threading.Thread(target=stream) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(server.engine.running) == 8)
        server.engine.gate.set()
        wait_for(lambda: server.engine.steps > 5)
        server.engine.gate.clear()  # all are in the middle of their answers, for as long as it takes
        server.uvicorn.handle_exit(15, None)
        wait_for(lambda: server.service.draining)
        refused = server.post(CHAT, HI)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert server.get("/ready").status_code == 503
        assert server.get("/health").status_code == 200
        server.engine.pause_s = 0.0
        server.engine.gate.set()
        for thread in threads:
            thread.join()
        assert finished == [True] * 8
        wait_for(lambda: server.uvicorn.should_exit)


def test_drain_waits_for_those_who_read_slowly(serve):
    """The engine is done long before them; they have the time of the drain, and not less."""
    with serve("w" * 3500, drain_timeout_s="60") as server:
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        body = json.dumps(HI | {"stream": True, "logprobs": True, "top_logprobs": 20})
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        lazy.sendall((head + body).encode())
        wait_for(lambda: len(server.engine.requests) == 1)
        server.uvicorn.handle_exit(15, None)
        wait_for(lambda: server.uvicorn.should_exit)
        time.sleep(LAST_BYTES_S + 0.5)
        received = b""
        while part := lazy.recv(1 << 20):
            received += part
        lazy.close()
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_drain_has_an_end_and_a_second_signal_makes_it_now(serve):
    for signals in (1, 2):
        seconds = "0.3" if signals == 1 else "60"
        with serve("z" * 4000, engine_options={"pause_s": 0.01}, drain_timeout_s=seconds) as server:
            connection = httpx.stream("POST", server.url + CHAT, json=HI | {"stream": True})
            with connection as response:
                next(response.iter_bytes())
                began = time.monotonic()
                for _ in range(signals):
                    server.uvicorn.handle_exit(15, None)
                wait_for(lambda: server.uvicorn.should_exit)
                assert time.monotonic() - began < 20, "the answer takes 40 s"
