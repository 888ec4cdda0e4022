"""Two servers on one file, loads over HTTP, figures per load."""

import asyncio
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import psutil

HERE = Path(__file__).parent


class Server:
    """One engine in its own process tree, addressed over HTTP."""

    def __init__(self, name, command, address=None):
        self.name, began = name, time.perf_counter()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            self.address = address or self.process.stdout.readline().strip()
            self.wait(began)
            self.first_token(began)
        except BaseException:
            self.stop()
            raise

    def wait(self, began):
        """Ask until it is ready; by a light client, as both processes of ours want the cores."""
        path = "/ready" if self.name.startswith("halogen") else "/health"
        while time.perf_counter() - began < 120:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.ask("GET", path)[0] == 200:
                    return
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} exited with {self.process.returncode}")
            time.sleep(0.01)
        raise TimeoutError(self.name)

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection(self.address.removeprefix("http://"), timeout=60)
        try:
            headers = {"content-type": "application/json"}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def first_token(self, began):
        body = {"model": "x", "prompt": [1, 504, 3575], "max_tokens": 1, "temperature": 0}
        if self.name.startswith("halogen"):
            body["model"] = json.loads(self.ask("GET", "/v1/models")[1])["data"][0]["id"]
        self.model = body["model"]
        status, answer = self.ask("POST", "/v1/completions", body)
        if status != 200:
            raise RuntimeError(f"{self.name} answered {status}: {answer[:200]!r}")
        self.cold_start_s = time.perf_counter() - began

    def tree(self):
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def resident_mib(self):
        """Proportional set size of the process tree."""
        return sum(p.memory_full_info().pss for p in self.tree()) / 2**20

    def rss_mib(self):
        """Resident memory of the processes, shared pages counted in each."""
        return sum(p.memory_info().rss for p in self.tree()) / 2**20

    def cpu_seconds(self):
        return sum(t.user + t.system for t in (p.cpu_times() for p in self.tree()))

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def halogen(model, threads, *, options=("kernels=auto",), name="halogen"):
    port = free_port()
    command = [sys.executable, "-m", "halogen_core.cli", "serve", "--backend", "cpu_ggml"]
    command += ["--model", model, "--threads", str(threads), "--port", str(port)]
    for option in options:
        command += ["--backend-option", option]
    return Server(name, command, f"http://127.0.0.1:{port}")


def llama(model, threads, *, slots=8, context=8192, flash="auto", name="llama.cpp"):
    command = [sys.executable, str(HERE / "llama_server.py"), model, "--threads", str(threads)]
    command += ["--slots", str(slots), "--context", str(context), "--flash", flash]
    return Server(name, command)


async def stream(client, server, prompt, count):
    """Times at which tokens arrived, from the request on (s)."""
    body = {
        "model": server.model, "prompt": prompt, "max_tokens": count, "temperature": 0,
        "stream": True, "ignore_eos": True,
    }  # fmt: skip
    began, times = time.perf_counter(), []
    url = server.address + "/v1/completions"
    async with client.stream("POST", url, json=body, timeout=600) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                times.append(time.perf_counter() - began)
    return times


async def together(server, prompts, count, width=None):
    """All prompts at once, or `width` at a time."""
    gate = asyncio.Semaphore(width or len(prompts))

    async def one(client, prompt):
        async with gate:
            return await stream(client, server, prompt, count)

    # a connection each: the peer closes kept ones while they are taken again
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits) as client:
        began = time.perf_counter()
        times = await asyncio.gather(*(one(client, p) for p in prompts))
        return times, time.perf_counter() - began


def load(server, prompts, count, width=None):
    """Figures of one load. Tokens are counted as asked for (a chunk may hold several)."""
    times, wall = asyncio.run(together(server, prompts, count, width))
    gaps = np.concatenate([np.diff(t) for t in times]) if count > 1 else np.zeros(1)
    span = [t[-1] - t[0] for t in times]
    return {
        "total_tok_s": len(prompts) * count / wall,
        "ttft_p50_s": float(np.median([t[0] for t in times])),
        "itl_p99_ms": float(np.quantile(gaps, 0.99) * 1e3),
        "decode_tok_s": (count - 1) / statistics.median(span) if count > 1 and min(span) else 0.0,
        "prefill_tok_s": len(prompts[0]) / float(np.median([t[0] for t in times])),
        "wall_s": wall,
    }


def machine():
    """What the figures were taken on."""
    text = Path("/proc/cpuinfo").read_text()
    model = next(ln.split(":")[1].strip() for ln in text.splitlines() if "model name" in ln)
    flags = next(ln for ln in text.splitlines() if ln.startswith("flags"))
    isa = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16") if f in flags]
    return {"cpu": model, "cpus": os.cpu_count(), "isa": isa}


def busy_seconds():
    """CPU time that this machine has spent, anybody's."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
