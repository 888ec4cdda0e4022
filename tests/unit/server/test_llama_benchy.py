"""llama-benchy, a load tool that others use, runs against the server and counts exactly."""

import json
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from transformers import PreTrainedTokenizerFast

BOOK = "It was the best of times, it was the worst of times. " * 400


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_args):
        pass


@pytest.fixture
def book(tmp_path):
    """A web server with a book on it: the tool wants one to make prompts from."""
    (tmp_path / "book.txt").write_text(BOOK)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/book.txt"
    server.shutdown()
    server.server_close()


def test_llama_benchy_runs_and_counts_exactly(serve, book, tmp_path):
    with serve("short answer", engine_options={"pause_s": 0.0005}) as server:
        folder = tmp_path / "tokenizer"
        core = server.service.tokenizer._core
        PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
        result = tmp_path / "result.json"
        command = [
            *(sys.executable, "-m", "llama_benchy", "--base-url", server.url + "/v1"),
            *("--model", "scripted", "--tokenizer", str(folder), "--book-url", book),
            *("--pp", "64", "--tg", "24", "--depth", "0", "128", "--runs", "2"),
            *("--concurrency", "1", "4", "--no-cache", "--exact-tg", "--skip-coherence"),
            *("--format", "json", "--save-result", str(result), "--exit-on-first-fail"),
        ]
        environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=280, check=False, env=environment
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        measured = [r for r in server.engine.requests if r.ignore_eos]
        assert measured
        assert all((r.max_tokens, r.min_tokens) == (24, 24) for r in measured)
        assert all(not r.use_prefix_cache for r in measured)
        rows = json.loads(result.read_text())["benchmarks"]
        assert [(r["concurrency"], r["context_size"]) for r in rows] == [
            *((1, 0), (4, 0), (1, 128), (4, 128))
        ]
        assert all(r["tg_throughput"]["mean"] > 0 for r in rows)
