"""The engine's own process: it answers, dies, hangs, comes back; the client never does."""

import asyncio
import contextlib
import os
import signal
from contextlib import asynccontextmanager

import pytest

from halogen_core.engine import process, wire
from halogen_core.engine.process import ProcessEngine
from halogen_core.errors import EngineUnavailable, HalogenError, RequestError

from .conftest import engine_options, request


@asynccontextmanager
async def running(path, **changes):
    engine = await ProcessEngine.start(engine_options(path, **changes))
    try:
        yield engine
    finally:
        await engine.close()


async def tokens_of(engine, item):
    return [t async for output in engine.generate(item) for t in output.token_ids]


async def until(condition, timeout_s=120.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def test_it_answers_many_at_once_and_leaves_nothing(tiny_gguf):
    async def main():
        async with running(tiny_gguf) as engine:
            assert engine.info.backend == "cpu_reference"
            alone = await tokens_of(engine, request("alone", [1, 2, 3]))
            many = await asyncio.gather(
                *(tokens_of(engine, request(f"r{i}", [1, 2, 3])) for i in range(20))
            )
            assert many == [alone] * 20
            stats = await engine.stats()
            assert (stats.running, stats.waiting, stats.blocks_active) == (0, 0, 0)

    asyncio.run(main())


def test_a_refusal_is_raised_and_a_left_stream_is_aborted(tiny_gguf):
    async def main():
        async with running(tiny_gguf, max_context=128) as engine:
            with pytest.raises(RequestError, match="context holds 128"):
                await tokens_of(engine, request("long", [1] * 200))
            stream = engine.generate(request("left", [1], max_tokens=100))
            await anext(stream)
            await stream.aclose()
            stats = await engine.stats()  # asked for after the abort, so answered after it
            assert (stats.running, stats.blocks_active) == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_hung_engine_is_replaced(endless_gguf, monkeypatch, how):
    async def main():
        async with running(endless_gguf) as engine:
            victim = engine.generate(request("victim", [1], max_tokens=16000))
            await anext(victim)
            os.kill(engine.pid, how)
            with monkeypatch.context() as patch:  # short only for who will never answer
                patch.setattr(process, "PING_S", 0.1)
                patch.setattr(process, "PONG_TIMEOUT_S", 1.0)
                last = [output async for output in victim][-1]
            assert (last.finish_reason, last.error_code[:6]) == ("error", "HRT-50")
            with contextlib.suppress(EngineUnavailable):
                await engine.check()
                pytest.fail("ready while restarting")
            await until(engine._ready.is_set)
            assert engine.restarts == 1
            assert len(await tokens_of(engine, request("next", [1, 2]))) == 12

    asyncio.run(main())


def test_stats_are_there_while_a_step_is_long(tiny_gguf, monkeypatch):
    """They are of the last step then; an engine that is alive is ready, however long it computes."""
    monkeypatch.setattr(process, "STATS_PATIENCE_S", 60.0)

    async def main():
        async with running(tiny_gguf) as engine:
            await tokens_of(engine, request("before", [1, 2]))
            known = await engine.stats()
            assert known.step > 0
            monkeypatch.setattr(process, "STATS_PATIENCE_S", 0.1)
            send = engine._send
            long_step = lambda m: isinstance(m, wire.GetStats) or send(m)  # noqa: E731
            monkeypatch.setattr(engine, "_send", long_step)
            assert await engine.stats() == known
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: not engine._ready.is_set())
            with pytest.raises(EngineUnavailable):
                await engine.stats()

    asyncio.run(main())


def test_a_failed_start_says_why(tmp_path):
    async def main():
        with pytest.raises(HalogenError) as error:
            await ProcessEngine.start(engine_options(tmp_path / "missing.gguf"))
        assert error.value.code.startswith("HRT-2")
        with pytest.raises(HalogenError) as error:
            await ProcessEngine.start(engine_options(tmp_path, backend="warp_drive"))
        assert error.value.code == "HRT-1107"

    asyncio.run(main())


def test_it_tells_how_much_is_loaded(tiny_gguf):
    heard = []

    async def main():
        options = engine_options(tiny_gguf)
        engine = await ProcessEngine.start(options, progress=lambda *now: heard.append(now))
        await engine.close()

    asyncio.run(main())
    shares = [done / total for done, total in heard]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert 1 < len(shares) <= 101


def test_drain_lets_the_running_end_and_refuses_new(tiny_gguf):
    async def main():
        async with running(tiny_gguf) as engine:
            last = asyncio.create_task(tokens_of(engine, request("last", [1], max_tokens=60)))
            await asyncio.sleep(0.05)
            drained = asyncio.create_task(engine.drain(120))
            await asyncio.sleep(0)
            with pytest.raises(EngineUnavailable, match="draining"):
                await tokens_of(engine, request("late", [1]))
            assert await drained
            assert len(await last) == 60

    asyncio.run(main())


def test_the_child_goes_when_its_server_is_killed(tiny_gguf, tmp_path):
    import subprocess
    import sys
    import textwrap

    import msgspec
    import psutil

    options = tmp_path / "options"
    options.write_bytes(msgspec.msgpack.encode(engine_options(tiny_gguf)))
    code = textwrap.dedent(f"""
        import asyncio, msgspec
        from halogen_core.engine.options import EngineOptions
        from halogen_core.engine.process import ProcessEngine
        raw = open({str(options)!r}, "rb").read()
        async def main():
            engine = await ProcessEngine.start(msgspec.msgpack.decode(raw, type=EngineOptions))
            print(engine.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as server:
        child = psutil.Process(int(server.stdout.readline()))
        server.kill()
    assert child.wait(timeout=60) is not None or not child.is_running()
