"""A part that gets hot behind a real engine process: limits, metrics and log lines follow."""

import asyncio

import pytest

from .conftest import request
from .test_engine_process import running, until


@pytest.mark.slow
def test_heat_is_seen_through_the_process_and_passes(tiny_gguf, capfd):
    seen = []

    async def watch(engine):
        while True:
            gauges = (await engine.stats()).gauges
            now = (gauges["device_throttled"], gauges["step_max_tokens"])
            if not seen or seen[-1] != now:
                seen.append(now)
            await asyncio.sleep(0.1)

    async def answers(engine):
        for turn in range(1000):
            async for _ in engine.generate(request(f"r{turn}", [turn % 90], max_tokens=20)):
                pass

    async def main():
        options = {
            "backend": "ascend",
            "device": "ascend:sim:910B2",
            "block_size": None,
            "max_batch_tokens": 2048,
            "deterministic": False,
            "log_level": "info",
            # hot for some seconds: limits are asked for once a second
            "backend_options": {"graph_buckets": "", "faults": "throttle@400-8400=0.5"},
        }
        async with running(tiny_gguf, **options) as engine:
            tasks = [asyncio.create_task(work(engine)) for work in (watch, answers)]
            await until(lambda: len(seen) >= 3, timeout_s=90)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    assert seen[:3] == [(0, 2048), (1, 128), (0, 2048)]
    told = capfd.readouterr().err
    assert "INFO halogen_ascend.backend: ascend runtime: simulator" in told
    assert "WARNING halogen_ascend.heat: `ascend:sim:910B2` runs at 50% of its clock" in told
    assert "INFO halogen_ascend.heat: `ascend:sim:910B2` has recovered" in told
