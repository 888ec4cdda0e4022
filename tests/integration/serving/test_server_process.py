"""`halogen serve` as users run it: a process, its engine's process, real signals."""

import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from halogen_core.cli.main import main

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Say hello."}]
REAL = ("--max-context", "512", "--pool-size", "64MiB")


@pytest.fixture(scope="module")
def served(serve_process):
    server = serve_process("--disk-pool-size", "4MiB")
    yield server
    assert server.stop() == 0


@pytest.fixture
def mortal(serve_process):
    """A server that a test may hurt."""
    server = serve_process("--drain-timeout-s", "200")
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait()


def test_it_says_what_runs_where(served):
    log = "".join(served.lines)
    assert "using device: cpu_reference:0" in log
    assert "KV pool:" in log
    status = served.status()
    assert status["engine"]["placement"]
    assert status["engine"]["reasons"]
    assert served.client.get("/v1/models").json()["data"][0]["id"] == "tiny-bytes"


@pytest.mark.slow
def test_the_openai_client_chats_with_a_real_model(smollm2_path, serve_process):
    server = serve_process(*REAL, model=smollm2_path)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"model": "smollm2", "messages": question, "temperature": 0, "max_tokens": 16}
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**options)
    options["model"] = client.models.list().data[0].id
    whole = client.chat.completions.create(**options)
    assert "Paris" in whole.choices[0].message.content
    stream = client.chat.completions.create(**options, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    body = {
        "prompt": "The capital of France is Paris",
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
    }
    rows = server.client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    at = rows["tokens"].index(" Paris")
    assert rows["token_logprobs"][at] > -3
    assert server.stop() == 0


def test_seeds_repeat_and_differ(served):
    def answer(seed):
        body = {"temperature": 1.0, "seed": seed, "max_tokens": 12}
        return served.chat(**body).json()["choices"][0]["message"]["content"]

    assert answer(1) == answer(1)
    assert len({answer(seed) for seed in range(4)}) > 1


def test_a_repeated_prompt_is_cached_and_answers_the_same(served):
    messages = [{"role": "user", "content": "Tell me about rivers. " * 8}]
    first = served.chat(messages=messages, temperature=0).json()
    again = served.chat(messages=messages, temperature=0).json()
    fresh = served.chat(messages=messages, temperature=0, cache_prompt=False).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    texts = {a["choices"][0]["message"]["content"] for a in (first, again, fresh)}
    assert len(texts) == 1


def test_prompt_logprobs_are_those_of_generation(served):
    """What `echo` reports for a text is what the model said when it wrote the text."""
    prompt = [65, 66, 67]
    body = {"prompt": prompt, "max_tokens": 6, "logprobs": 2, "temperature": 0}
    written = served.client.post("/v1/completions", json=body | {"echo": True}).json()
    rows = written["choices"][0]["logprobs"]
    assert "".join(rows["tokens"]) == written["choices"][0]["text"]
    assert rows["token_logprobs"][0] is None
    ids = served.client.post("/v1/completions", json=body | {"stop": None}).json()
    assert ids["choices"][0]["logprobs"]["token_logprobs"] == rows["token_logprobs"][3:]
    for chosen, top in zip(rows["token_logprobs"][3:], rows["top_logprobs"][3:], strict=True):
        assert max(top.values()) == chosen


def test_random_bytes_stream_as_they_are_whole(served):
    """A model that writes broken UTF-8 and control characters: same text, valid JSON, any cut."""
    for seed in range(12):
        body = {"messages": HI, "max_tokens": 20 + seed, "temperature": 1.5, "seed": seed}
        whole = served.client.post(CHAT, json=body).json()["choices"][0]
        stream = served.client.post(CHAT, json=body | {"stream": True}).text.split("\n\n")
        assert stream[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in stream[:-2]]
        text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        assert text == whole["message"]["content"]
        assert chunks[-1]["finish_reason"] == whole["finish_reason"]


def test_the_metrics_page_names_what_a_real_engine_counts(served):
    served.chat()
    text = served.client.get("/metrics").text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "two families of one name"
    page = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text(encoding="utf-8")
    table = page.partition("The engine's own")[2].partition("`--metrics-compat")[0]
    documented = set(re.findall(r"`(halogen_\w+)", table))
    samples = {s.name for f in text_string_to_metric_families(text) for s in f.samples}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in samples} | samples
    assert documented <= families, documented - families


def test_ignore_eos_holds(served):
    answer = served.chat(ignore_eos=True, max_tokens=200, temperature=2.0).json()
    assert answer["usage"]["completion_tokens"] == 200
    assert answer["choices"][0]["finish_reason"] == "length"


def test_min_tokens_holds_against_every_end_token(served):
    """vllm#5849: a bias makes each end token certain, so only the minimum can prevent it."""
    info = served.client.get("/tokenizer_info").json()
    for token in info["eos_token_ids"]:
        body = {"logit_bias": {str(token): 100}, "temperature": 0, "max_tokens": 20}
        assert served.chat(**body).json()["usage"]["completion_tokens"] == 1
        answer = served.chat(**body, min_tokens=8).json()
        assert answer["usage"]["completion_tokens"] == 9
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_prompt_cut_inside_a_character_is_answered(served):
    """vllm#48853: what is left of the character does not leak the prompt into the answer."""
    for cut in (1, 2, 3):
        prompt = [*b"secret ", *"🌍".encode()[:cut]]
        body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "stream": True}
        response = served.client.post("/v1/completions", json=body)
        assert response.status_code == 200
        assert "secret" not in response.text


def test_hot_sampling_drops_nothing(served):
    """llama.cpp#11738: temperature 1.5 with top_k 100, many at once; every reply is whole."""

    async def main():
        async with httpx.AsyncClient(base_url=served.url, timeout=None) as client:
            body = {"messages": HI, "temperature": 1.5, "top_k": 100, "max_tokens": 6}
            return await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(120)))

    answers = asyncio.run(main())
    assert {answer.status_code for answer in answers} == {200}
    assert all(answer.json()["choices"][0]["finish_reason"] for answer in answers)


def test_a_prompt_over_the_context_is_refused_with_both_numbers(served):
    response = served.client.post("/v1/completions", json={"prompt": [100] * 1100})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "1100" in error["message"]
    assert "1024" in error["message"]


def blocks_are_free(served):
    stats = served.status()["stats"]
    idle = stats["running"] == stats["waiting"] == stats["blocks_active"] == 0
    return idle and stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]


def test_32_clients_with_random_cancels_leave_nothing_behind(served):
    """Issue 2, test 5: every block free, no task or file descriptor behind; health stays quick."""
    rng = random.Random(11)
    served.chat()
    server, worker = psutil.Process(served.process.pid), served.worker
    before = [(p.num_fds(), p.num_threads()) for p in (server, worker)]

    async def one(client, i):
        body = {
            "messages": [{"role": "user", "content": f"Count to {i}. " * rng.randint(1, 8)}],
            "stream": rng.random() < 0.7,
            "n": rng.choice([1, 1, 2]),
            "max_tokens": rng.randint(2, 200),
            "ignore_eos": True,
        }
        try:
            async with asyncio.timeout(rng.choice([0.02, 0.1, 0.3, 0.6, 200, 200, 200])):
                async with client.stream("POST", CHAT, json=body) as response:
                    await response.aread()
                    return response.status_code
        except TimeoutError:
            return 0

    async def ask_health(client):
        began = time.perf_counter()
        assert (await client.get("/health")).status_code == 200
        return time.perf_counter() - began

    async def health(client, seconds):
        while True:
            seconds.append(await ask_health(client))
            await asyncio.sleep(0.02)

    async def main():
        limits = httpx.Limits(max_connections=34)
        seconds = []
        async with httpx.AsyncClient(base_url=served.url, timeout=None, limits=limits) as client:
            alone = [await ask_health(client) for _ in range(20)]
            probe = asyncio.create_task(health(client, seconds))
            done = await asyncio.gather(*(one(client, i) for i in range(96)))
            probe.cancel()
        return done, statistics.median(alone), statistics.median(seconds)

    done, alone, busy = asyncio.run(main())
    assert set(done) == {0, 200}
    assert busy < 0.25 + 20 * alone, "`alone` tells how busy the machine is with other things"
    served.wait(lambda: blocks_are_free(served))
    assert served.status()["admission"]["inside"] == 0

    def settled():
        now = [(p.num_fds(), p.num_threads()) for p in (server, worker)]
        return all(a[0] <= b[0] and a[1] <= b[1] + 8 for a, b in zip(now, before, strict=True))

    served.wait(settled)


def test_company_changes_no_answer(served):
    """The same tokens alone and among others (vllm#13408, mlx-lm#965, llama.cpp#7052)."""
    bodies = [
        {
            "messages": [{"role": "user", "content": f"{animal} {n * 7} " * (n + 1)}],
            "temperature": n % 2,
            "seed": n,
            "max_tokens": 24,
        }
        for n, animal in enumerate(["cat", "dog", "horse", "cow", "duck", "fish"] * 3)
    ]

    def text(answer):
        return answer.json()["choices"][0]["message"]["content"]

    alone = [text(served.client.post(CHAT, json=body)) for body in bodies]

    async def together():
        async with httpx.AsyncClient(base_url=served.url, timeout=None) as client:
            return await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))

    assert [text(answer) for answer in asyncio.run(together())] == alone


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_hanging_engine_is_replaced(mortal, how):
    """T12: readiness falls within 5 s (10 s when it hangs), streams end with an error event."""
    first = mortal.worker
    body = {"messages": HI, "stream": True, "max_tokens": 900, "ignore_eos": True}
    with mortal.client.stream("POST", CHAT, json=body) as response:
        lines = response.iter_lines()
        for line in lines:
            if '"content":"' in line and '"content":""' not in line:
                break
        hurt = time.monotonic()
        first.send_signal(how)
        rest = [line for line in lines if line]
        assert time.monotonic() - hurt < 30
    assert rest[-1] == "data: [DONE]"
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert error["code"] == "engine_unavailable"
    assert mortal.client.get("/health").status_code == 200
    assert mortal.chat().status_code in (200, 503)
    mortal.wait(mortal.is_ready)
    assert mortal.worker.pid != first.pid
    assert mortal.chat().status_code == 200
    assert not psutil.pid_exists(first.pid) or first.status() == psutil.STATUS_ZOMBIE


def test_sigterm_drains_and_nothing_is_left(mortal):
    worker = mortal.worker
    began, answers = [], []

    def stream():
        body = {"messages": HI, "stream": True, "max_tokens": 500, "ignore_eos": True}
        with httpx.stream("POST", mortal.url + CHAT, json=body, timeout=280) as response:
            began.append(response.status_code)
            answers.append(response.read())

    threads = [threading.Thread(target=stream) for _ in range(6)]
    for thread in threads:
        thread.start()
    mortal.wait(lambda: began == [200] * 6)
    mortal.process.send_signal(signal.SIGTERM)
    mortal.wait(lambda: not mortal.is_ready())
    assert mortal.chat().status_code == 503
    for thread in threads:
        thread.join()
    assert [answer.endswith(b"data: [DONE]\n\n") for answer in answers] == [True] * 6
    assert all(b'"error"' not in answer for answer in answers)
    assert mortal.process.wait(120) == 0
    psutil.wait_procs([worker], timeout=60)
    assert not worker.is_running()


@pytest.mark.slow
def test_a_killed_server_leaves_no_engine_and_no_port(mortal, serve_process):
    worker, port = mortal.worker, mortal.url.rpartition(":")[2]
    mortal.process.kill()
    mortal.process.wait()
    _, alive = psutil.wait_procs([worker], timeout=60)
    assert not alive
    again = serve_process("--port", port)
    assert again.url.endswith(port)
    assert again.chat().status_code == 200
    assert again.stop() == 0


def test_what_cannot_start_ends_with_code_and_fix(served, tiny_path, tmp_path):
    """In this process: none of these gets as far as an engine."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_path.read_bytes()[:5000])
    busy = served.url.rpartition(":")[2]
    for flags, code in (
        (("--model", "no-such-model"), "HRT-2301"),
        (("--model", str(tmp_path / "missing.gguf")), "HRT-2"),
        (("--model", str(broken)), "HRT-2"),
        (("--model", __file__), "HRT-2"),
        (("--model", str(tiny_path), "--port", busy), "HRT-1007"),
        (("--model", str(tiny_path), "--api-key-file", "/nowhere"), "HRT-1004"),
        (("--model", str(tiny_path), "--cors-origins", "example.org"), "HRT-1002"),
        (("--model", str(tiny_path), "--kv-snapshot", "/nowhere/x.kv"), "HRT-3311"),
    ):
        done = CliRunner().invoke(main, ["serve", *flags])
        assert done.exit_code == 2, (flags, done.output)
        assert f"[{code}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "code"),
    [(("--backend", "no_such"), "HRT-1107"), (("--pool-size", "1KiB"), "HRT-3")],
)
def test_an_engine_that_cannot_start_ends_the_server(tiny_path, flags, code):
    command = [sys.executable, "-m", "halogen_core.cli", "serve", "--model", str(tiny_path)]
    done = subprocess.run(
        [*command, "--port", "0", *flags], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"[{code}" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
