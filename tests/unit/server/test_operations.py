"""Running the server: metrics, overload, a failing engine, where it listens."""

import asyncio
import json
import re
import socket
import threading
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from halogen_core.config import ServerSettings, resolve
from halogen_core.errors import ConfigError
from halogen_core.server.serving import bind, describe

from .conftest import wait_for

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-correct-horse"


# -- metrics


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(text, name, **labels):
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return None


def test_metrics_grow_by_what_clients_saw(serve):
    with serve("four words and more") as server:
        before = server.get("/metrics").text
        usage = [server.post(CHAT, HI).json()["usage"] for _ in range(3)]
        server.post(CHAT, b"{")
        after = server.get("/metrics").text
        for name, field in (
            ("halogen_prompt_tokens_total", "prompt_tokens"),
            ("halogen_generation_tokens_total", "completion_tokens"),
        ):
            grown = value(after, name) - value(before, name)
            assert grown == sum(u[field] for u in usage)
        assert value(after, "halogen_requests_total", finish_reason="stop") == 3
        assert value(after, "halogen_time_to_first_token_seconds_count") == 3
        assert value(after, "halogen_inter_token_latency_seconds_count") == sum(
            u["completion_tokens"] - 1 for u in usage
        )
        assert value(after, "halogen_errors_total", hrt_code="HRT-4006") == 1
        assert value(after, "halogen_kv_blocks", state="active") == 30
        assert value(after, "halogen_cache_usage") == 0.3
        assert value(after, "halogen_preemptions_total") == 3
        assert value(after, "halogen_ready") == 1
        assert value(after, "halogen_model_info", model="scripted") == 1
        blocks = [s.value for s in families(after)["halogen_kv_blocks"].samples]
        assert sum(blocks) == 100


def test_metrics_are_well_formed_and_hold_no_request_data(serve):
    with serve("x") as server:
        before = server.get("/metrics").text
        names = [line.split()[2] for line in before.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names)), "two families of one name"
        assert value(before, "halogen_engine_prompt_tokens_total") == 5
        assert value(before, "halogen_odd_name__total") == 1
        body = HI | {"user": "evil\nhalogen_fake 1", "model": 'a"b\n{}', "session_id": "s-1"}
        server.post(CHAT, body)
        text = server.get("/metrics").text
    assert "evil" not in text
    assert "s-1" not in text
    assert "\nhalogen_fake" not in text
    for name, family in families(text).items():
        assert name.startswith("halogen_")
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        labels = {key for sample in family.samples for key in sample.labels}
        assert labels <= {
            *("le", "code", "finish_reason", "reason", "phase", "hrt_code", "state", "kind"),
            *("model", "version", "backend", "device", "kv_dtype", "halogen"),
        }


def test_vllms_names_hold_the_same_values(serve):
    with serve("a few words", metrics_compat="vllm") as server:
        server.post(CHAT, HI)
        text = server.get("/metrics").text
        for ours, theirs in (
            ("halogen_generation_tokens_total", "vllm:generation_tokens_total"),
            ("halogen_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count"),
            ("halogen_cache_usage", "vllm:kv_cache_usage_perc"),
            ("halogen_preemptions_total", "vllm:num_preemptions_total"),
        ):
            assert value(text, theirs, model_name="scripted") == value(text, ours)
        assert value(text, "vllm:request_success_total", finished_reason="stop") == 1


def test_metrics_on_their_own_port_or_not_at_all(serve, monkeypatch):
    with serve("x", metrics="off") as server:
        assert server.get("/metrics").status_code == 404
    with serve("x", metrics_port="0", api_key=("k",)) as server:
        assert server.get("/metrics", headers={"x-api-key": "k"}).status_code == 404


# -- overload


def test_the_queue_is_bounded_and_says_when_to_come_back(serve):
    with serve("ok", max_batch="2", max_queue="2") as server:
        server.engine.gate.clear()
        with httpx.Client() as client:

            def ask(results):
                results.append(client.post(server.url + CHAT, json=HI, timeout=60).status_code)

            results = []
            threads = [threading.Thread(target=ask, args=(results,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            wait_for(lambda: server.service.admission.inside == 4)
            refused = server.post(CHAT, HI)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
            assert server.post(CHAT, HI | {"stream": True}).status_code == 429
            assert server.get("/health").status_code == 200
            assert server.get("/ready").status_code == 200
            server.engine.gate.set()
            for thread in threads:
                thread.join()
        assert results == [200] * 4
        assert server.post(CHAT, HI).status_code == 200
        too_many = server.post(CHAT, HI | {"n": 5})
        assert too_many.status_code == 400


def test_the_engines_own_refusal_is_a_429_too(serve):
    with serve("ok", engine_options={"max_queue": 0}) as server:
        for stream in (False, True):
            response = server.post(CHAT, HI | {"stream": stream})
            assert response.status_code == 429
            assert "retry-after" in response.headers
        text = server.get("/metrics").text
        assert value(text, "halogen_errors_total", hrt_code="HRT-4290") == 2
        assert value(text, "halogen_requests_rejected_total", reason="queue_full") == 2


def test_a_crowd_of_requests_cannot_pile_up(serve):
    with serve("ok", max_batch="4", max_queue="4") as server:
        server.engine.gate.clear()

        async def main():
            limits = httpx.Limits(max_connections=100)
            async with httpx.AsyncClient(timeout=None, limits=limits) as client:

                async def one():
                    return (await client.post(server.url + CHAT, json=HI)).status_code

                tasks = [asyncio.create_task(one()) for _ in range(150)]
                while sum(task.done() for task in tasks) < 142:
                    await asyncio.sleep(0.01)
                server.engine.gate.set()
                return await asyncio.gather(*tasks)

        statuses = asyncio.run(main())
    assert sorted(set(statuses)) == [200, 429]
    assert statuses.count(200) == 8


# -- the engine


def test_readiness_and_answers_follow_the_engine(serve):
    def script(request):
        return [*b"ab", RuntimeError("broken")] if len(request.prompt_token_ids) > 20 else b"ok"

    with serve(script) as server:
        assert server.get("/ready").json()["status"] == "ready"
        fatal = {"messages": [{"role": "user", "content": "x" * 30}]}
        broken = server.post(CHAT, fatal | {"stream": True})
        assert '"hrt_code":"HRT-5031"' in broken.text
        text = server.get("/metrics").text
        assert value(text, "halogen_errors_total", hrt_code="HRT-5031") == 1
        down = server.get("/ready")
        assert down.status_code == 503
        assert down.json()["error"]["hrt_code"] == "HRT-5031"
        assert int(down.headers["retry-after"]) >= 1
        assert server.post(CHAT, HI).status_code == 503
        assert server.post(CHAT, HI | {"stream": True}).status_code == 503
        assert server.get("/health").status_code == 200
        text = server.get("/metrics").text
        assert value(text, "halogen_ready") == 0
        assert value(text, "halogen_kv_blocks", state="free") is None


def test_an_unforeseen_error_is_a_500_that_tells_nothing(serve, monkeypatch):
    with serve("x") as server:

        def explode(*_args, **_kwargs):
            raise ZeroDivisionError("secret path /home/me")

        monkeypatch.setattr(server.service, "render", explode)
        response = server.post(CHAT, HI)
        assert response.status_code == 500
        assert response.json()["error"]["hrt_code"] == "HRT-5000"
        assert "secret" not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_within_the_engine_is_no_silence_of_it(serve, monkeypatch, stream):
    """The stream's own timeout, which only sends pings, must not swallow it."""
    with serve("x", sse_ping_s="30") as server:

        def expire(_request):
            raise TimeoutError

        monkeypatch.setattr(server.service.engine, "generate", expire)
        response = server.post(CHAT, HI | {"stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["hrt_code"] == "HRT-5000"


# -- where it listens


def test_unix_socket(serve, tmp_path):
    path = tmp_path / "halogen.sock"
    leftover = socket.socket(socket.AF_UNIX)
    leftover.bind(str(path))
    leftover.close()
    with serve("ok", port=None, unix_socket=str(path)):
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.post("http://x" + CHAT, json=HI).status_code == 200
        with pytest.raises(ConfigError, match="HRT-1007"):
            bind(ServerSettings(unix_socket=path))


def test_ipv6_and_busy_ports():
    listener = bind(ServerSettings(host="::1", port=0))
    port = listener.getsockname()[1]
    assert describe(listener) == f"http://[::1]:{port}"
    with pytest.raises(ConfigError) as caught:
        bind(ServerSettings(host="::1", port=port))
    assert caught.value.code == "HRT-1007"
    assert str(port) in str(caught.value)
    listener.close()
    with pytest.raises(ConfigError, match="HRT-1007"):
        bind(ServerSettings(host="no.such.host.invalid"))


def test_names_and_status(serve):
    with serve("x", served_model_name=("gpt-4", "other")) as server:
        ids = [m["id"] for m in server.get("/v1/models").json()["data"]]
        assert ids == ["gpt-4", "other", "scripted"]
        assert server.post(CHAT, HI | {"model": "other"}).json()["model"] == "other"
        assert server.post(CHAT, HI).json()["model"] == "gpt-4"
        assert server.get("/v1/models/gpt-4").json()["max_model_len"] == 4096
        status = server.get("/v1/status").json()
        assert status["engine"]["backend"] == "scripted"
        assert json.dumps(status)


def test_limits_of_the_configuration_hold(serve):
    with serve("y" * 100, max_decode_len="7", max_prompt_len="20") as server:
        assert server.post(CHAT, HI).json()["usage"]["completion_tokens"] == 7
        long = {"messages": [{"role": "user", "content": "x" * 30}]}
        assert server.post(CHAT, long).json()["error"]["code"] == "context_length_exceeded"
    with serve("y" * 100, default_max_tokens="9") as server:
        assert server.post(CHAT, HI).json()["usage"]["completion_tokens"] == 9
    assert resolve(environment={}).server.default_max_tokens is None


def test_the_metrics_page_names_what_is_served_and_nothing_else(hello):
    page = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(halogen_\w+)", page.partition("The engine's own")[0]))
    served = set()
    for name, family in families(hello.get("/metrics").text).items():
        served.add(name + ("_total" if family.type == "counter" else ""))
    of_the_engine = {"halogen_preemptions_total", "halogen_odd_name__total"}
    of_the_engine |= {"halogen_engine_prompt_tokens_total", "halogen_engine_cache_usage"}
    assert documented == served - of_the_engine
