"""Asking a plugin for its hardware in a process of its own, with a timeout and a cache.

A probe may load a vendor's driver: it can hang, crash or print. None of that reaches the caller.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import attrs
import msgspec

from halogen_core import __version__
from halogen_core.plugins.loading import Plugin
from halogen_core.spi import DeviceInfo, ProbeContext, ProbeResult, Reason

TIMEOUT_S = 30.0
CACHE_S = 24 * 3600.0


def probe(
    plugin: Plugin,
    backend: str,
    context: ProbeContext,
    *,
    cache_dir: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> ProbeResult:
    """Run `halogen_probe` of one plugin isolated; failures are a score of 0 with reasons."""
    path = cache_dir and cache_dir / "probe" / _cache_key(plugin, backend, context, environment)
    if path and (cached := _read_cache(path)):
        return cached
    result = _run(plugin, backend, context, timeout_s)
    if path and result.score > 0:
        _write_cache(path, result)
    return result


def _run(plugin: Plugin, backend: str, context: ProbeContext, timeout_s: float) -> ProbeResult:
    question = json.dumps(
        {
            "module": plugin.module,
            "backend": backend,
            "device": context.device,
            "options": dict(context.options),
        }
    )
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            raw, code = _answer(_start(theirs, question, said), ours, timeout_s)
        except (TimeoutError, subprocess.TimeoutExpired):
            return _failed("probe_timeout", f"probe did not answer within {timeout_s:.0f} s")
        try:
            return decode_result(raw)
        except msgspec.DecodeError:  # nothing, or not all of it
            return _failed("probe_crash", _last_words(said, code))


def _start(channel: socket.socket, question: str, said: IO[str]) -> subprocess.Popen[bytes]:
    """A probe that answers over `channel`, in a session of its own to be ended as a whole.

    What it prints goes to a file: nobody has to read that for it to go on.
    """
    module = "halogen_core.plugins.probe_main"
    with channel:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(channel.fileno()), question],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            pass_fds=[channel.fileno()],
            start_new_session=True,
        )


def _answer(
    process: subprocess.Popen[bytes], channel: socket.socket, timeout_s: float
) -> tuple[bytes, int]:
    """What it sent before it ended, and its exit code; it is killed when it takes too long.

    Raises `TimeoutError` or `subprocess.TimeoutExpired`.
    """
    until = time.monotonic() + timeout_s
    raw = bytearray()
    with process:
        try:
            # while it runs: what a socket does not hold at once is sent when the rest was read
            while part := _part(channel, until):
                raw += part
            return bytes(raw), process.wait(until - time.monotonic())
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _part(channel: socket.socket, until: float) -> bytes:
    channel.settimeout(max(1e-3, until - time.monotonic()))
    return channel.recv(1 << 16)


def _last_words(said: IO[str], code: int) -> str:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    said.seek(0)
    tail = said.read().strip().splitlines()[-1:] or ["no message"]
    return f"probe process ended with {how}: {tail[0]}"


def _failed(code: str, text: str) -> ProbeResult:
    hint = "run `halogen doctor`, or reinstall the plugin or its driver"
    return ProbeResult(score=0, reasons=(Reason(code=code, text=text, hint=hint),))


def encode_result(result: ProbeResult) -> bytes:
    """A result as JSON."""
    return msgspec.json.encode(attrs.asdict(result))


def decode_result(raw: bytes) -> ProbeResult:
    """The inverse of `encode_result`."""
    data = msgspec.json.decode(raw)
    return ProbeResult(
        score=data["score"],
        devices=tuple(DeviceInfo(**d) for d in data["devices"]),
        reasons=tuple(Reason(**r) for r in data["reasons"]),
    )


def _cache_key(
    plugin: Plugin,
    backend: str,
    context: ProbeContext,
    environment: Mapping[str, str] | None,
) -> str:
    env = environment or {}
    wanted = plugin.manifest.probe_env if plugin.manifest else ()
    facts = (
        __version__,
        plugin.distribution,
        plugin.version,
        _last_edit(plugin),
        plugin.module,
        backend,
        sys.executable,
        context.device,
        sorted(context.options.items()),
        sorted((k, env.get(k, "")) for k in wanted),
        # device nodes come and go with hardware and drivers, whatever the vendor calls them
        sorted(os.listdir("/dev")) if os.path.isdir("/dev") else [],
    )
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32] + ".json"


def _last_edit(plugin: Plugin) -> int:
    """When a file of the plugin was last written: a checkout changes without a new version."""
    if plugin.manifest is None:
        return 0
    package = Path(plugin.manifest.path).parent
    return max((path.stat().st_mtime_ns for path in package.rglob("*.py")), default=0)


def _read_cache(path: Path) -> ProbeResult | None:
    try:
        if time.time() - path.stat().st_mtime > CACHE_S:
            return None
        return decode_result(path.read_bytes())
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return None


def _write_cache(path: Path, result: ProbeResult) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(encode_result(result))
        scratch.replace(path)
    except OSError:
        return  # a read-only cache costs time, nothing else
