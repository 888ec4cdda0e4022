"""A tiny seeded model as a GGUF file with a tokenizer, and `halogen serve` on it."""

import queue
import re
import signal
import subprocess
import sys
import threading
import time

import gguf
import httpx
import numpy as np
import psutil
import pytest

from halogen_core.loader.tokenizer import TokenKind
from halogen_core.spi.testing import tiny_checkpoint

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Say hello."}]
CONTROL = ["<|im_end|>", "<s>", "<|im_start|>"]
MERGED = ["he", "ll", "hell"]


def byte_pieces():
    """GPT-2's printable stand-ins for the 256 bytes, in the order of the bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in plain else next(rest)) for byte in range(256)]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """Tokens 0 to 255 are the bytes, so random weights speak every kind of broken UTF-8."""
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny-bytes.gguf")


def write_tiny(path, template=None):
    """The tiny model as a GGUF file, with a chat template if one is given."""
    pieces = byte_pieces() + CONTROL + MERGED
    checkpoint = tiny_checkpoint("llama-interleaved", vocab=len(pieces), context=1024, seed=3)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in checkpoint.hparams.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    kinds = [TokenKind.NORMAL] * 256 + [TokenKind.CONTROL] * len(CONTROL)
    writer.add_token_types([int(k) for k in [*kinds, *[TokenKind.NORMAL] * len(MERGED)]])
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(256)
    if template is not None:
        writer.add_chat_template(template)
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        writer.add_tensor(name, tensor.data.view(np.float32).reshape(tensor.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


FLAGS = ("--backend", "cpu_reference", "--threads", "1", "--deterministic", "on")
TINY = ("--block-size", "8", "--pool-size", "24MiB", "--max-batch", "16")


class Served:
    """A running `halogen serve`, its log and its processes."""

    def __init__(self, model, *flags, cache_dir):
        command = [sys.executable, "-m", "halogen_core.cli", "serve", "--model", str(model)]
        command += ["--port", "0", "--cache-dir", str(cache_dir), *FLAGS, *flags]
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines = []
        self._found = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._found.get(timeout=280)
        assert self.url, "".join(self.lines)
        self.client = httpx.Client(base_url=self.url, timeout=280)

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r"serving .* on (http://\S+)", line):
                self._found.put(match[1])
        self._found.put(None)

    @property
    def worker(self):
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def status(self):
        return self.client.get("/v1/status").json()

    def chat(self, **fields):
        return self.client.post(CHAT, json={"messages": HI, "max_tokens": 8} | fields)

    def wait(self, condition, seconds=120.0):
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "".join(self.lines[-20:])
            time.sleep(0.02)
        return time.monotonic()

    def is_ready(self):
        return self.client.get("/ready").status_code == 200

    def stop(self, sig=signal.SIGTERM, seconds=120):
        self.process.send_signal(sig)
        code = self.process.wait(seconds)
        self._reader.join(5)
        self.client.close()
        return code


@pytest.fixture(scope="session")
def serve_process(tiny_path, tmp_path_factory):
    """`serve_process(*flags, model=…)` starts a server; those that still run are ended."""
    cache_dir = tmp_path_factory.mktemp("cache")
    started = []

    def start(*flags, model=tiny_path):
        shape = TINY if model.name.startswith("tiny") else ()
        started.append(Served(model, *shape, *flags, cache_dir=cache_dir))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


TOOL_TEMPLATE = (
    '{% if tools %}Tools: {{ tools | tojson }} <tool_call>{"name": …, "arguments": …}</tool_call>'
    "{% endif %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
)


@pytest.fixture(scope="session")
def tool_server(serve_process, tmp_path_factory):
    """The tiny model with a template for tools, served for answers that have to have a form."""
    path = write_tiny(tmp_path_factory.mktemp("models") / "tiny-tools.gguf", TOOL_TEMPLATE)
    server = serve_process(model=path)
    yield server
    assert server.stop() == 0
