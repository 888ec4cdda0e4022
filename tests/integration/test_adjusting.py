"""Settings of a backend through the server's and the engine's processes."""

import asyncio

import pytest

from halogen_core.engine.process import ProcessEngine
from halogen_core.errors import HalogenError

from .conftest import engine_options


def test_a_backend_without_settings_says_so(tiny_gguf):
    async def ask():
        engine = await ProcessEngine.start(engine_options(tiny_gguf))
        try:
            assert await engine.adjust({}) == {}
            with pytest.raises(HalogenError, match="cpu_reference.*no settings") as caught:
                await engine.adjust({"flash_threshold": "1"})
            assert caught.value.code == "HRT-3407"
            await engine.check()
        finally:
            await engine.close()

    asyncio.run(ask())
