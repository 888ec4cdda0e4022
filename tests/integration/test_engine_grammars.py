"""An engine process goes on while a grammar is compiled."""

import asyncio
import json

import llguidance
import msgspec
import pytest

from halogen_core.engine import process
from halogen_core.engine.process import ProcessEngine

from .conftest import engine_options, request
from .serving.conftest import write_tiny

SECONDS_TO_COMPILE = {"type": "integer", "multipleOf": 499_979}


@pytest.fixture(scope="module")
def speaking_gguf(tmp_path_factory):
    """A tiny model with a tokenizer."""
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny-bytes.gguf")


def slow(name, **changes):
    source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SECONDS_TO_COMPILE))
    return msgspec.structs.replace(request(name, [1, 2], **changes), grammar=source)


async def tokens_of(engine, item):
    return [t async for output in engine.generate(item) for t in output.token_ids]


def test_it_answers_pings_and_others_while_it_compiles(speaking_gguf, monkeypatch):
    monkeypatch.setattr(process, "PONG_TIMEOUT_S", 1.0)

    async def main():
        engine = await ProcessEngine.start(engine_options(speaking_gguf))
        try:
            left = asyncio.create_task(anext(engine.generate(slow("left", max_tokens=400))))
            kept = asyncio.create_task(tokens_of(engine, slow("kept")))
            await asyncio.sleep(0.1)
            await engine.check()
            assert await tokens_of(engine, request("free", [1, 2]))
            assert not kept.done(), "compiling took no time"
            left.cancel()
            assert await kept
            stats = await engine.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            assert stats.counters["requests_admitted"] == 2, "who left is not computed"
        finally:
            await engine.close()

    asyncio.run(main())
