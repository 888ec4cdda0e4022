"""The real openai-python client against a real server."""

import asyncio
import threading
import time

import openai
import pytest

TEXT = "Grüße, 世界! 👩‍👩‍👧 ok"


@pytest.fixture(scope="module")
def server(serve):
    with serve(TEXT) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


MESSAGES = [{"role": "user", "content": "hi"}]


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "scripted"
    assert model.max_model_len == 4096
    assert client.models.retrieve("scripted").id == "scripted"


def test_chat(client):
    answer = client.chat.completions.create(model="scripted", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.system_fingerprint
    assert answer._request_id


def test_chat_stream_with_usage_and_choices(client):
    texts, finishes, usages = ["", ""], [[], []], []
    stream = client.chat.completions.create(
        model="scripted",
        messages=MESSAGES,
        stream=True,
        n=2,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if not chunk.choices:
            usages.append(chunk.usage)
            continue
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            finishes[choice.index].append(choice.finish_reason)
    assert texts == [TEXT, TEXT]
    assert finishes == [["stop"], ["stop"]]
    assert len(usages) == 1
    assert usages[0].completion_tokens == 2 * (len(TEXT.encode()) + 1)


def test_chat_stream_helper_accumulates(client):
    with client.chat.completions.stream(model="scripted", messages=MESSAGES) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="scripted", messages=MESSAGES, logprobs=True, top_logprobs=3, max_tokens=5
    )
    rows = answer.choices[0].logprobs.content
    assert len(rows) == 5
    assert bytes(b for row in rows for b in row.bytes) == TEXT.encode()[:5]
    assert all(len(row.top_logprobs) == 3 for row in rows)


def test_completions_whole_and_stream(client):
    whole = client.completions.create(model="scripted", prompt="x", max_tokens=100)
    stream = client.completions.create(model="scripted", prompt="x", max_tokens=100, stream=True)
    assert whole.choices[0].text == TEXT
    assert "".join(c.choices[0].text for c in stream) == TEXT


def test_default_length_of_completions_is_openais(client):
    answer = client.completions.create(model="scripted", prompt="x")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_async_client_in_parallel(server):
    async def main():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:

            async def one(stream):
                answer = await client.chat.completions.create(
                    model="scripted", messages=MESSAGES, stream=stream
                )
                if not stream:
                    return answer.choices[0].message.content
                return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

            return await asyncio.gather(*(one(i % 2 == 0) for i in range(16)))

    assert asyncio.run(main()) == [TEXT] * 16


def test_the_newer_of_two_limits_wins(client):
    answer = client.chat.completions.create(
        model="scripted", messages=MESSAGES, max_tokens=9, max_completion_tokens=3
    )
    assert answer.usage.completion_tokens == 3


def test_errors_are_the_clients_own_classes(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="scripted", prompt="x" * 5000)
    assert caught.value.code == "context_length_exceeded"
    assert "5000" in caught.value.message
    assert "4096" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="scripted",
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    assert caught.value.code == "unsupported_feature"
    assert caught.value.param == "tools"


def test_an_error_midway_surfaces_in_the_stream(serve):
    with serve(lambda _request: [*b"abc", RuntimeError("device fell over")]) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.body["hrt_code"] == "HRT-5031"
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="scripted", messages=MESSAGES)
        assert server.get("/ready").status_code == 503
        assert server.get("/health").status_code == 200


def test_tokens_before_a_failure_arrive_even_when_it_is_seen_with_them(serve):
    def script(_request):  # the engine fails while the server looks away
        server.loop.call_soon_threadsafe(time.sleep, 0.3)
        return [*b"abc", RuntimeError("device fell over")]

    with serve(script) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        received = []
        with pytest.raises(openai.APIError) as caught:
            for chunk in client.chat.completions.create(
                model="scripted", messages=MESSAGES, stream=True
            ):
                received.append(chunk.choices[0].delta.content or "")
        assert "".join(received) == "abc"
        assert caught.value.body["hrt_code"] == "HRT-5031"


def test_a_retried_429_is_served(serve):
    with serve("ok", max_batch="1", max_queue="0") as server:
        server.service.admission.inside += 1  # somebody else's sequence
        once = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.RateLimitError) as caught:
            once.chat.completions.create(model="scripted", messages=MESSAGES)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        threading.Timer(0.2, lambda: setattr(server.service.admission, "inside", 0)).start()
        patient = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=2)
        answer = patient.chat.completions.create(model="scripted", messages=MESSAGES)
        assert answer.choices[0].message.content == "ok"
