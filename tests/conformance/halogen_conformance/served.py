"""The real server over the backend under test, and checked requests to it."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import psutil

from halogen_conformance import faults
from halogen_conformance.case import Failure
from halogen_conformance.serving_canary import COLOURS, alphabet, prompt, write_canary
from halogen_conformance.target import Target

if TYPE_CHECKING:
    import httpx

START_S = 180.0
HALOGEN = "from halogen_core.cli.main import main; main()"
LOGPROB_SLACK = 0.15
"""Twice the rounding of a 16-bit backend; one foreign token among a hundred exceeds it."""


@attrs.frozen(kw_only=True)
class Ask:
    """One canary request."""

    colour: int
    length: int
    tokens: int
    seed: int = 0

    def body(self, **more: Any) -> dict[str, Any]:
        rng = np.random.default_rng((self.seed, self.colour, self.length))
        return {
            "model": "canary",
            "prompt": prompt(self.colour, self.length, rng),
            "max_tokens": self.tokens,
            "temperature": 0,
            "logprobs": 1,
            **more,
        }


class Server:
    """A running `halogen serve` over the canary model."""

    def __init__(self, target: Target, *flags: str) -> None:
        # late: every worker imports this module, and httpx brings its own command line along
        from httpx import Client

        self._folder = tempfile.TemporaryDirectory(prefix="halogen-canary-")
        folder = Path(self._folder.name)
        write_canary(folder / "canary.gguf")
        faults.install(folder / "site")
        (folder / "target.json").write_text(target.to_json(), encoding="utf-8")
        self.control = folder / "control"
        options = (f"target={folder / 'target.json'}", f"control={self.control}")
        command = [sys.executable, "-c", HALOGEN, "serve", "--model", str(folder / "canary.gguf")]
        command += ["--backend", faults.NAME, "--port", "0", "--cache-dir", str(folder / "cache")]
        for option in options:
            command += ["--backend-option", option]
        path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [*command, *flags],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.lines: list[str] = []
        self._found: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        url = self._found.get(timeout=START_S)
        if url is None:
            raise Failure(f"the server did not start: {''.join(self.lines[-8:])}")
        self.client = Client(base_url=url, timeout=120)
        self.expected: float | None = None

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r"serving .* on (http://\S+)", line):
                self._found.put(match[1])
        self._found.put(None)

    def post(self, ask: Ask, **more: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json=ask.body(**more))

    def check(self, ask: Ask, response: httpx.Response) -> None:
        """Raise unless the answer is whole and made of its own sequence's tokens alone."""
        if response.status_code != 200:
            raise Failure(f"{ask}: status {response.status_code}: {response.text[:300]}")
        choice = response.json()["choices"][0]
        self.check_text(ask, choice["text"], choice["logprobs"]["token_logprobs"])

    def check_text(self, ask: Ask, text: str, logprobs: Sequence[float]) -> None:
        """The same of an answer in parts."""
        allowed = {chr(t) for t in alphabet(ask.colour)}
        if len(text) != ask.tokens or len(logprobs) != ask.tokens:
            raise Failure(f"{ask}: answer of {len(text)} tokens: {text!r}")
        if foreign := set(text) - allowed:
            raise Failure(f"{ask}: the answer holds tokens of another request: {foreign}")
        if self.expected is None:
            self.expected = float(logprobs[0])
        worst = max(abs(float(p) - self.expected) for p in logprobs)
        if worst > LOGPROB_SLACK:
            raise Failure(
                f"{ask}: log-probabilities are off by {worst:.2f}: attention saw foreign tokens"
            )

    def crowd(self, asks: Sequence[Ask], workers: int = 12) -> None:
        """All at once, all checked."""
        with ThreadPoolExecutor(max_workers=workers) as pool:
            for ask, response in zip(asks, pool.map(self.post, asks), strict=True):
                self.check(ask, response)

    def metric(self, name: str) -> float:
        """The sum over labels of one metric."""
        text = self.client.get("/metrics").text
        found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        if not found:
            raise Failure(f"/metrics lacks `{name}`")
        return sum(float(value) for value in found)

    def wait(self, condition: Any, what: str, limit_s: float = 60.0) -> float:
        """Seconds until `condition()` holds."""
        from httpx import HTTPError

        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            try:
                if condition():
                    return time.monotonic() - began
            except HTTPError:
                pass
            time.sleep(0.05)
        raise Failure(f"not within {limit_s:.0f} s: {what}")

    def order(self, *orders: str) -> None:
        """Faults for the next steps."""
        self.control.write_text(" ".join(orders), encoding="utf-8")

    def ready(self) -> bool:
        return self.client.get("/ready").status_code == 200

    def memory(self) -> int:
        """Resident bytes of the server and all its processes."""
        root = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in (root, *root.children(recursive=True)))

    def stop(self) -> tuple[int, float, list[psutil.Process]]:
        """Exit code, seconds it took, and processes left behind."""
        root = psutil.Process(self.process.pid)
        children = root.children(recursive=True)
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failure("the server did not end within 60 s of SIGTERM") from None
        took = time.monotonic() - began
        _, alive = psutil.wait_procs(children, timeout=10)
        for child in alive:
            child.kill()
        self.client.close()
        self._folder.cleanup()
        return code, took, alive

    def kill(self) -> None:
        """End it whatever it does."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.kill()
        self.process.kill()
        self.process.wait()


def asks(rng: np.random.Generator, count: int, longest: int = 120) -> list[Ask]:
    """Requests of all colours and mixed lengths."""
    return [
        Ask(
            colour=i % COLOURS,
            length=int(rng.integers(1, longest)),
            tokens=int(rng.integers(1, 32)),
            seed=i,
        )
        for i in range(count)
    ]
