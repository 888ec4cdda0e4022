"""A server on loopback over a scripted model: real HTTP, real engine thread, chosen tokens.

The vocabulary is the 256 bytes and some control tokens, so a text has as many tokens as bytes and
every cut through a character or a stop string can be made.
"""

import asyncio
import functools
import threading
import time
from contextlib import contextmanager

import attrs
import httpx
import msgspec
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from halogen_core.config import resolve
from halogen_core.engine.grammar_trials import GrammarTrials
from halogen_core.engine.local import LocalEngine
from halogen_core.engine.protocol import (
    EngineInfo,
    EngineStats,
    Timings,
    TokenLogprobs,
    TokenOutput,
)
from halogen_core.errors import Overloaded
from halogen_core.loader import Tokenizer
from halogen_core.loader.chat_template import render_chat
from halogen_core.loader.tokenizer import TokenKind
from halogen_core.server.admission import Admission
from halogen_core.server.app import create_app
from halogen_core.server.metrics import Metrics
from halogen_core.server.service import Service
from halogen_core.server.serving import bind, make_server

EOS, EOS2, BOS, START = 256, 257, 258, 259
CONTROL = ["<|im_end|>", "<eos2>", "<s>", "<|im_start|>"]
VOCAB = 260


def byte_tokenizer():
    """Token i is byte i."""
    from halogen_core.loader.tokenizer import _BYTE_OF

    char_of = {byte: char for char, byte in _BYTE_OF.items()}
    pieces = [char_of[i] for i in range(256)]
    core = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return Tokenizer(
        build=lambda: core,
        pieces=pieces + CONTROL,
        kinds=[TokenKind.NORMAL] * 256 + [TokenKind.CONTROL] * 4,
        byte_level=True,
        bos_token_id=BOS,
        add_bos=False,
        end_token_ids=frozenset({EOS, EOS2}),
        chat_templates={},
    )


def render(messages, tools=None, add_generation_prompt=True, template_kwargs=None):
    """ChatML without newlines."""
    ids = []
    for message in messages:
        ids += [START, *f"{message['role']}:{message['content']}".encode(), EOS]
    return [*ids, START] if add_generation_prompt else ids


@attrs.define
class Running:
    request: object
    script: list
    done: int = 0


class ScriptedEngine:
    """A `Steppable` whose tokens are chosen by `script(request) -> token ids`; EOS follows."""

    def __init__(self, script, *, max_queue=64, max_batch=64, pause_s=0.0):
        self.script = script
        self.pause_s = pause_s
        self.gate = threading.Event()
        self.gate.set()
        self.max_queue, self.max_batch = max_queue, max_batch
        self.running = {}
        self.aborted = []
        self.requests = []
        self.steps = 0

    @property
    def has_work(self):
        return bool(self.running)

    def next_wake(self):
        return None if self.gate.is_set() else 0.01

    def submit(self, request):
        self.requests.append(request)
        if len(self.running) >= self.max_queue:
            return [
                TokenOutput(
                    request_id=request.request_id,
                    finish_reason="error",
                    error_code=Overloaded.default_code,
                    error="queue is full",
                )
            ]
        self.running[request.request_id] = Running(request, list(self.script(request)))
        return []

    def abort(self, request_id):
        if self.running.pop(request_id, None):
            self.aborted.append(request_id)

    def step(self):
        if not self.gate.is_set():
            return []
        self.steps += 1
        time.sleep(self.pause_s)
        outputs = [self._advance(r) for r in list(self.running.values())[: self.max_batch]]
        for output in outputs:
            if output.finish_reason:
                self.running.pop(output.request_id, None)
        return outputs

    def _advance(self, run):
        request = run.request
        token = run.script[run.done] if run.done < len(run.script) else EOS
        if token in (EOS, EOS2) and (request.ignore_eos or run.done < request.min_tokens):
            token = ord("x")
        if isinstance(token, Exception):
            self.running.clear()
            raise token
        run.done += 1
        ends = (EOS, EOS2, *request.stop_token_ids)
        reason = None
        if token in ends and not request.ignore_eos:
            reason = "stop"
        elif run.done >= request.max_tokens:
            reason = "length"
        row = self._row(request, token)
        prompt = []
        if request.prompt_logprobs and run.done == 1:
            prompt = [None, *(self._row(request, t) for t in request.prompt_token_ids[1:])]
        return TokenOutput(
            request_id=request.request_id,
            token_ids=[token],
            logprobs=[row] if row else [],
            prompt_logprobs=prompt,
            finish_reason=reason,
            stop_token_id=token if reason == "stop" else None,
            cached_tokens=4,
            timings=Timings(queued_s=0.0, ttft_s=0.01, total_s=0.02) if reason else None,
        )

    @staticmethod
    def _row(request, token):
        if request.num_logprobs < 0:
            return None
        n = request.num_logprobs
        ids = [token, *(i for i in range(n + 1) if i != token)][:n]
        return TokenLogprobs(
            token_id=token, logprob=-0.5, top_ids=ids, top_logprobs=[-0.5 - i for i in range(n)]
        )

    def stats(self):
        return EngineStats(
            step=self.steps,
            running=len(self.running),
            waiting=0,
            blocks_total=100,
            blocks_free=60,
            blocks_active=30,
            blocks_cached=10,
            counters={"preemptions": 3.0, "prompt_tokens": 5.0, "odd name!": 1.0},
            gauges={"cache_usage": 0.5},
        )

    def close(self):
        pass


INFO = EngineInfo(
    model_id="scripted",
    architecture="llama",
    model_path="/nowhere",
    content_id="0123456789abcdef",
    vocab_size=VOCAB,
    context_length=4096,
    backend="scripted",
    device="scripted:0",
    block_size=16,
    num_blocks=100,
    kv_dtype="f16",
)


def wait_for(condition, seconds=60.0):
    """Until `condition()`; the time is for a machine that does much else, and never a promise."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.005)


@attrs.define
class Server:
    """A running server and the engine behind it."""

    url: str
    service: Service
    engine: ScriptedEngine
    loop: asyncio.AbstractEventLoop
    uvicorn: object
    client: httpx.Client = attrs.field(factory=lambda: httpx.Client(timeout=60))

    def post(self, path, body, **options):
        kind = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.client.post(self.url + path, **kind, **options)

    def get(self, path, **options):
        return self.client.get(self.url + path, **options)

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)


@contextmanager
def serving(script, *, info_context=4096, engine_options=None, template=None, **settings):
    """A server that answers with a text, or with what `script(request)` chooses; a script may
    hold an exception, which the step then raises. `settings` are as on the command line."""
    text = script
    chosen = script if callable(script) else lambda _request: list(text.encode())
    info = msgspec.structs.replace(INFO, context_length=info_context)
    engine = ScriptedEngine(chosen, **(engine_options or {}))
    tokenizer = byte_tokenizer()
    if template is not None:
        tokenizer = attrs.evolve(tokenizer, chat_templates={"default": template})
    config = resolve({"port": 0} | settings, environment={"HOME": "/nowhere"})
    started, box = threading.Event(), {}

    async def main():
        client = LocalEngine(engine, info)
        service = Service(
            config=config,
            tokenizer=tokenizer,
            render=functools.partial(render_chat, tokenizer) if template else render,
            trials=GrammarTrials(byte_tokenizer),
            admission=Admission(limit=config.engine.max_batch + config.engine.max_queue),
            metrics=Metrics(),
        )
        service.engine_started(client)
        listener = bind(config.server)
        server = make_server(service, create_app(service))
        port = listener.getsockname()[1] if config.server.unix_socket is None else 0
        box["server"] = Server(
            f"http://127.0.0.1:{port}", service, engine, asyncio.get_running_loop(), server
        )
        started.set()
        await server.serve(sockets=[listener])
        # of connections that a test closed a moment ago; what never ends is found below
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left, timeout=20)
        service.trials.close()
        await client.close()
        box["tasks"] = asyncio.all_tasks() - {asyncio.current_task()}

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(60)
    server = box["server"]
    try:
        yield server
    finally:
        engine.gate.set()
        server.client.close()
        server.uvicorn.should_exit = True
        thread.join(60)
    assert not thread.is_alive(), "the server did not stop"
    assert not box["tasks"], "tasks were left behind"
    assert engine.running == {}, "sequences were left in the engine"
    assert server.service.admission.inside == 0


@pytest.fixture(scope="session")
def serve():
    """`with serve(text_or_script, **settings) as server`"""
    return serving


@pytest.fixture(scope="module")
def hello():
    with serving("Hello, wörld! 🌍") as server:
        yield server
