"""Races of an engine process's life: requests that begin as it dies, closing at any moment."""

import asyncio
import os
import resource
import signal
import time

import pytest

from halogen_core.engine import process
from halogen_core.engine.child import Child
from halogen_core.engine.process import ProcessEngine
from halogen_core.errors import EngineUnavailable, HalogenError

from .conftest import engine_options, request
from .test_engine_process import running, tokens_of, until


def test_a_request_that_begins_as_the_engine_dies_is_refused_and_not_lost(endless_gguf):
    async def main():
        async with running(endless_gguf) as engine:
            victim = engine.generate(request("victim", [1], max_tokens=16000))
            await anext(victim)
            # a route has checked and made the stream, but not yet asked it for its first output
            stream = engine.generate(request("late", [1, 2]))
            os.kill(engine.pid, signal.SIGKILL)
            last = [output async for output in victim][-1]
            assert last.finish_reason == "error"
            assert "SIGKILL" in last.error, "what ended the engine is told"
            await until(lambda: not engine._ready.is_set())
            async with asyncio.timeout(60):
                with pytest.raises(EngineUnavailable):
                    await anext(stream)
            await until(engine._ready.is_set)
            assert len(await tokens_of(engine, request("next", [1, 2]))) == 12

    asyncio.run(main())


@pytest.mark.slow
def test_a_stalled_server_does_not_blame_its_engine(tiny_gguf, monkeypatch):
    monkeypatch.setattr(process, "PONG_TIMEOUT_S", 1.0)

    async def main():
        async with running(tiny_gguf) as engine:
            for _ in range(2):
                asked = asyncio.create_task(engine.check())
                await asyncio.sleep(0)
                time.sleep(4.0)  # the whole event loop stands still; the answer waits in the socket
                await asked
            assert engine.restarts == 0

    asyncio.run(main())


@pytest.mark.slow
def test_a_broken_message_costs_one_life_and_not_the_supervisor(tiny_gguf, monkeypatch):
    async def main():
        async with running(tiny_gguf) as engine:
            handle, broken = engine._handle, []

            def once(message):
                if not broken:
                    broken.append(message)
                    raise ValueError("not a message")
                handle(message)

            monkeypatch.setattr(engine, "_handle", once)
            with pytest.raises(EngineUnavailable):
                await engine.check()
            await until(lambda: engine.restarts == 1 and engine._ready.is_set())
            assert len(await tokens_of(engine, request("next", [1, 2]))) == 12

    asyncio.run(main())


def test_closing_between_two_lives_waits_for_nobody_and_starts_none(tiny_gguf, monkeypatch):
    monkeypatch.setattr(process, "RESTART_DELAYS_S", (30.0,))

    async def main():
        engine = await ProcessEngine.start(engine_options(tiny_gguf))
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.restarts == 1)
        began = time.monotonic()
        await engine.close()
        assert time.monotonic() - began < 15, "the next life begins after 30 s"
        assert engine.pid is None
        assert engine._supervisor.done()

    asyncio.run(main())


def test_a_disk_that_is_full_costs_the_dump_and_nothing_else(tiny_gguf, tmp_path):
    async def main():
        async with running(tiny_gguf) as engine:
            before = await tokens_of(engine, request("first", list(range(1, 40))))
            # writes beyond this many bytes fail in the child, as they do on a full disk
            resource.prlimit(engine.pid, resource.RLIMIT_FSIZE, (100, 100))
            with pytest.raises(HalogenError) as caught:
                await engine.save_cache(str(tmp_path / "cache"))
            assert "cannot be written" in caught.value.message
            assert not caught.value.message.startswith("["), "the code is told once"
            assert "check the directory" in caught.value.fix
            assert list(tmp_path.iterdir()) == []
            assert await tokens_of(engine, request("again", list(range(1, 40)))) == before
            assert engine.restarts == 0

    asyncio.run(main())


def test_a_start_that_is_given_up_ends_its_child_at_once(tiny_gguf):
    async def main():
        child = Child.spawn()  # never told what to build: it loads for ever
        starting = asyncio.create_task(ProcessEngine.start(engine_options(tiny_gguf), child=child))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert time.monotonic() - began < 8, "10 s is what a child gets that is not killed"
        assert child.process.returncode is not None
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
