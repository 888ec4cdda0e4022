"""The time before the engine is there, engines that do not come, and routes of plugins."""

import asyncio

import httpx
import pytest
from fastapi import APIRouter

from halogen_core.config import resolve
from halogen_core.errors import OutOfMemory
from halogen_core.server.serving import bind, make_service, serve

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


class Idle:
    """An engine that only closes."""

    def __init__(self, info):
        self.info = info
        self.closed = False

    async def check(self):
        pass

    async def drain(self, timeout_s):
        return True

    async def close(self):
        self.closed = True


def started(tokenizer, check, start, *, extensions=(), **settings):
    """Run `check(client, service)` while a server starts its engine with `start`."""

    async def main():
        config = resolve({"port": 0} | settings, environment={"HOME": "/nowhere"})
        service = make_service(config, tokenizer)
        listener = bind(config.server)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = asyncio.create_task(serve(service, listener, start, extensions))
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await check(client, service)
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left

    asyncio.run(main())


@pytest.fixture
def tokenizer(hello):
    return hello.service.tokenizer


def test_while_it_loads_it_lives_and_says_so(hello, tokenizer):
    go = asyncio.Event()
    engine = Idle(hello.service.engine.info)

    async def start():
        await go.wait()
        return engine

    async def check(client, service):
        assert (await client.get("/health")).status_code == 200
        for response in (
            await client.get("/ready"),
            await client.post(CHAT, json=HI),
            await client.post(CHAT, json=HI | {"stream": True}),
            await client.get("/v1/models"),
        ):
            assert response.status_code == 503
            assert "loading: 0%" in response.json()["error"]["message"]
            assert "retry-after" in response.headers
        assert "halogen_ready 0.0" in (await client.get("/metrics")).text
        go.set()
        while not service.has_engine:
            await asyncio.sleep(0.01)
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "scripted"

    started(tokenizer, check, start)
    assert engine.closed


def test_an_engine_that_cannot_start_ends_the_server_with_its_reason(tokenizer):
    async def main():
        config = resolve({"port": 0}, environment={"HOME": "/nowhere"})

        async def start():
            raise OutOfMemory("model needs 31.2 GiB, device 0 has 27.9 GiB free")

        with pytest.raises(OutOfMemory, match="31"):
            await serve(make_service(config, tokenizer), bind(config.server), start)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_routes_of_plugins_are_served_behind_the_same_key(hello, tokenizer):
    router = APIRouter()

    @router.get("/vendor/temperature")
    async def temperature() -> dict[str, float]:
        return {"celsius": 61.5}

    async def start():
        return Idle(hello.service.engine.info)

    async def check(client, _service):
        assert (await client.get("/vendor/temperature")).status_code == 401
        key = {"x-api-key": "k"}
        assert (await client.get("/vendor/temperature", headers=key)).json() == {"celsius": 61.5}

    started(tokenizer, check, start, extensions=[router], api_key=("k",))
