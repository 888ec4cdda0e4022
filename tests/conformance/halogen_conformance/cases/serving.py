"""L4: the real server over the backend, under load, cancellation, faults and time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from halogen_conformance.bench import Bench
from halogen_conformance.case import Case, Failure
from halogen_conformance.served import Ask, Server, asks

ROOMY = ("--max-batch", "16", "--max-context", "512", "--max-batch-tokens", "256")
SOAK_S = float(os.environ.get("HALOGEN_CONFORM_SOAK_S", "20"))
"""Longer for a certificate that means to run for weeks."""
ALONE = ("faults/hang", "soak/memory")
"""A busy machine must not look like a hang, nor slow the waves that show a leak."""
WAVES = 8
"""At least, however long they take."""
SETTLED_BY = 4
"""Times SOAK_S until resident memory must have stopped to rise."""
SLOPE_BYTES = 24 << 10
"""Resident memory that a request may cost for good."""


def cases() -> Iterator[Case]:
    """All of them."""
    checks: dict[str, tuple[Callable[[Bench], None], str]] = {
        "serving/mixed-lengths": (mixed, "an answer that holds another request's tokens"),
        "serving/stream-equals-whole": (stream, "a stream that differs from the whole answer"),
        "serving/cancel-storm": (
            storm,
            "cancelled requests whose blocks are lost or still written",
        ),
        "serving/preemption": (preemption, "a preempted sequence that comes back changed"),
        "serving/cached-prefix": (prefix, "a cached prefix of another conversation"),
        "faults/transient": (transient, "a transient error that loses or repeats tokens"),
        "faults/slow": (slow, "a slow step that breaks requests"),
        "faults/wrong-shape": (wrong_shape, "a wrong answer passed on as a right one"),
        "faults/device-lost": (device_lost, "a lost device that ends the server, or hangs clients"),
        "faults/hang": (hang, "a hanging step that nobody notices"),
        "soak/memory": (soak, "memory that grows with every request"),
        "exit/clean": (clean_exit, "processes or requests left behind at the end"),
    }
    for name, (run, why) in checks.items():
        limit = 300 + SETTLED_BY * SOAK_S
        yield Case(
            id=f"L4/{name}",
            topic="serving",
            why=why,
            run=run,
            device=False,
            timeout_s=limit,
            alone=name in ALONE,
        )


@contextmanager
def serving(bench: Bench, *flags: str) -> Iterator[Server]:
    """A server for one case; what it did is part of the case."""
    assert bench.target is not None
    server = Server(bench.target, *(flags or ROOMY))
    try:
        server.check(*_quiet(server))
        yield server
    except BaseException:
        server.kill()
        raise
    code, took, left = server.stop()
    bench.facts["exit_s"] = round(took, 2)
    if code != 0 or left:
        raise Failure(f"the server ended with {code} and left {len(left)} processes")


def _quiet(server: Server) -> tuple[Ask, Any]:
    """The log-probability that every answer must have, from one request alone."""
    ask = Ask(colour=0, length=8, tokens=4)
    return ask, server.post(ask)


def _idle(server: Server) -> None:
    """Everything that requests held is given back."""
    server.wait(
        lambda: (
            server.metric("halogen_requests_running") == 0
            and server.metric("halogen_requests_waiting") == 0
        ),
        "no request running or waiting",
    )
    if breaches := server.metric("halogen_kv_invariant_breaches_total"):
        raise Failure(f"the block ledger was breached {breaches:.0f} times")


def mixed(bench: Bench) -> None:
    with serving(bench) as server:
        server.crowd(asks(bench.rng, 40, longest=200))
        _idle(server)


def stream(bench: Bench) -> None:
    with serving(bench) as server:
        for ask in asks(bench.rng, 6):
            text, logprobs = _streamed(server, ask)
            server.check_text(ask, text, logprobs)
            whole = server.post(ask).json()["choices"][0]["text"]
            if whole != text:
                raise Failure(f"{ask}: streamed {text!r}, whole {whole!r}")


def _streamed(server: Server, ask: Ask, chunks: int = 1 << 30) -> tuple[str, list[float]]:
    """Text and logprobs of a stream, cut off after `chunks` chunks."""
    text, logprobs = "", []
    with server.client.stream("POST", "/v1/completions", json=ask.body(stream=True)) as response:
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            for choice in json.loads(line[6:])["choices"]:
                text += choice["text"]
                logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
            chunks -= 1
            if chunks <= 0:
                break
    return text, logprobs


def storm(bench: Bench) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with serving(bench) as server:
        doomed = [Ask(colour=i % 8, length=30 + i, tokens=300, seed=i) for i in range(24)]
        with ThreadPoolExecutor(max_workers=16) as pool:
            cut = [pool.submit(_streamed, server, ask, 1 + i % 3) for i, ask in enumerate(doomed)]
            server.crowd(asks(bench.rng, 16), workers=6)
            for future in cut:
                future.result()
        _idle(server)
        server.crowd(asks(bench.rng, 8))


def preemption(bench: Bench) -> None:
    """A pool for about three of eight long sequences."""
    assert bench.target is not None
    small = ("--max-batch", "8", "--max-context", "256", "--pool-size", "480KiB")
    with serving(bench, *small) as server:
        server.crowd([Ask(colour=i, length=60, tokens=150, seed=i) for i in range(8)], workers=8)
        bench.facts["preemptions"] = server.metric("halogen_preemptions_total")
        _idle(server)


def prefix(bench: Bench) -> None:
    with serving(bench) as server:
        for colour in range(4):
            ask = Ask(colour=colour, length=180, tokens=6)
            server.check(ask, server.post(ask))
        server.crowd([Ask(colour=i % 4, length=180, tokens=10) for i in range(12)])
        bench.facts["prefix_hits"] = server.metric("halogen_prefix_cache_hits_total")


# ---------------------------------------------------------------- faults


def transient(bench: Bench) -> None:
    with serving(bench) as server:
        server.order("transient", "transient")
        server.crowd(asks(bench.rng, 8))


def slow(bench: Bench) -> None:
    with serving(bench) as server:
        server.order(*["slow"] * 4)
        server.crowd(asks(bench.rng, 8))


def wrong_shape(bench: Bench) -> None:
    with serving(bench) as server:
        server.order("wrong_shape")
        ask = Ask(colour=3, length=20, tokens=10)
        response = server.post(ask)
        if response.status_code == 200:
            choice = response.json()["choices"][0]
            if choice.get("finish_reason") != "error":
                server.check(ask, response)
        _comes_back(bench, server)


def device_lost(bench: Bench) -> None:
    with serving(bench) as server:
        server.order("device_lost")
        _refused(server)
        _comes_back(bench, server)


def hang(bench: Bench) -> None:
    with serving(bench, *ROOMY, "--hang-timeout-s", "3") as server:
        server.order("hang")
        _refused(server)
        _comes_back(bench, server)


def _refused(server: Server) -> None:
    """A request that meets a fault is answered with an error, soon."""
    ask = Ask(colour=5, length=20, tokens=10)
    began = time.monotonic()
    response = server.post(ask)
    if response.status_code == 200:
        server.check(ask, response)
    elif response.status_code < 500:
        raise Failure(f"a device fault is answered with {response.status_code}")
    if time.monotonic() - began > 60:
        raise Failure("the client of a failed request waited for more than a minute")


def _comes_back(bench: Bench, server: Server) -> None:
    bench.facts["restart_s"] = round(server.wait(server.ready, "ready again", 120), 2)
    server.crowd(asks(bench.rng, 8))


# ---------------------------------------------------------------- time


def soak(bench: Bench) -> None:
    """Waves of requests; resident memory over the second half must not rise with them.

    What is compiled when it is first met is no leak, so a soak goes on until it is level; what
    leaks with every request never is.
    """
    with serving(bench) as server:
        points: list[tuple[int, int]] = []
        began, past, slope = time.monotonic(), 0.0, np.inf
        while (
            len(points) < WAVES
            or past < SOAK_S
            or (slope > SLOPE_BYTES and past < SETTLED_BY * SOAK_S)
        ):
            server.crowd(asks(bench.rng, 12, longest=60))
            points.append((12 * (1 + len(points)), server.memory()))
            past, slope = time.monotonic() - began, _slope(points[len(points) // 2 :])
        some = points[:: 1 + len(points) // 16]
        bench.facts |= {
            "requests": points[-1][0],
            "bytes_per_request": slope,
            "soak_s": round(past, 1),
            "resident_mib": " ".join(str(held >> 20) for _, held in some),
        }
        if slope > SLOPE_BYTES:
            raise Failure(f"memory grows by {slope / 1024:.1f} KiB with every request")
        _idle(server)


def _slope(points: list[tuple[int, int]]) -> float:
    """Bytes for each request, by least squares; infinite for a single point."""
    if len(points) < 2:
        return np.inf
    return float(np.polyfit(*np.array(points, np.float64).T, 1)[0])


def clean_exit(bench: Bench) -> None:
    with serving(bench) as server:
        server.crowd(asks(bench.rng, 4))
