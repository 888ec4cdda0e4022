"""Ctrl-C, SIGTERM and a lost server while a model loads: over at once, and nothing is left.

The backend is one whose probe never ends and has started a process of its own.
"""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from halogen_core.engine.child import Child
from halogen_core.engine.options import EngineOptions
from halogen_core.plugins import PluginRegistry
from halogen_core.plugins.probe import probe
from halogen_core.spi import ProbeContext

PROBE = """
    import os, subprocess, sys, time
    from halogen_core.spi import BackendSpec, hookimpl

    @hookimpl
    def halogen_backends():
        return [BackendSpec(name="endless", factory="none:none")]

    @hookimpl
    def halogen_probe(name, context):
        own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open("{pids}.part", "w") as file:
            file.write(f"{{os.getpid()}} {{own.pid}}")
        os.rename("{pids}.part", "{pids}")
        time.sleep(600)
"""
# as a terminal starts it; a test run in the background hands down an ignored SIGINT
HALOGEN = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from halogen_core.cli.main import main; main()"
)
SOON_S = 20.0
"""Far less than the probe's 30 s and 600 s; a busy machine needs some."""


@pytest.fixture
def pids(install, tmp_path):
    """Waits for the probe's processes; ends them after the test."""
    path = tmp_path / "pids"
    install("endless", PROBE.format(pids=path))
    found = []

    def wait():
        until = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        found.extend(int(word) for word in path.read_text().split())
        return found

    yield wait
    for pid in filter(lives, found):
        psutil.Process(pid).kill()


def lives(pid):
    """Whether it runs; one that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_end(pids):
    until = time.monotonic() + SOON_S
    while any(map(lives, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(lives, pids))


def halogen(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", HALOGEN, *arguments], stderr=subprocess.PIPE, text=True
    )


def endless_engine():
    child = Child.spawn()
    child.tell(EngineOptions(model_path="", model_id="m", end_token_ids=[], backend="endless"))
    return child


def test_a_probe_that_times_out_ends_with_what_it_started(pids):
    plugin = next(p for p in PluginRegistry.discover().plugins if p.name == "endless")
    result = probe(plugin, "endless", ProbeContext(), timeout_s=6)
    assert result.reasons[0].code == "probe_timeout"
    assert all_end(pids())


def test_an_engine_that_loads_ends_with_its_server(pids):
    child = endless_engine()
    started = pids()
    child.connection.close()
    assert child.process.wait(SOON_S) == 1
    assert all_end(started)


def test_a_killed_engine_takes_its_probe_along(pids):
    child = endless_engine()
    started = pids()
    child.end()
    assert all_end(started)


@pytest.mark.parametrize(
    ("command", "number"),
    [("run", signal.SIGINT), ("serve", signal.SIGINT), ("serve", signal.SIGTERM)],
)
def test_a_signal_ends_a_command_that_loads(pids, smollm2_path, tmp_path, command, number):
    flags = ["--model", str(smollm2_path), "--backend", "endless", "--cache-dir", str(tmp_path)]
    flags += ["--port", "0"] if command == "serve" else ["hello"]
    process = halogen(command, *flags)
    started = [*pids(), *(p.pid for p in psutil.Process(process.pid).children(recursive=True))]
    process.send_signal(number)
    said = process.communicate(timeout=SOON_S)[1]
    # a server that listens already takes signals, and ends with 0
    ended = {-number, 128 + number} | ({0} if command == "serve" else set())
    assert process.returncode in ended
    assert "Traceback" not in said
    assert all_end(started)


def test_native_code_does_not_keep_ctrl_c_waiting():
    """`sum` of a range holds the interpreter and looks at no signal."""
    code = """
import signal
from halogen_core.cli.interrupts import ended_by_ctrl_c
signal.signal(signal.SIGINT, signal.default_int_handler)
with ended_by_ctrl_c():
    print("in", flush=True)
    sum(range(10**12))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "in\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(SOON_S) == -signal.SIGINT
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_ctrl_c_is_pythons_again_afterwards():
    from halogen_core.cli.interrupts import ended_by_ctrl_c

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ended_by_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with ended_by_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
