"""`hf:` names, against a small server that speaks the hub's protocol (the network has none here)."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
from tiny_files import write_hf, write_llama


def commit(folder):
    """Changes with the files, as the client keeps listings by commit."""
    names = sorted(map(str, folder.rglob("*")))
    return hashlib.sha1(repr(names).encode()).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """`/api/models/R/…` and `/R/resolve/…` over folders named after repositories."""

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        if path[:2] == ["api", "models"]:
            self.describe("/".join(path[2:4]), path[4:])
            return
        file = self.server.root / "/".join(path[:2]) / "/".join(path[4:])
        self.server.asked.append("/".join(path[4:]))
        if path[2] != "resolve" or not file.is_file():
            self.reply(404, b"", body=body)
        else:
            self.reply(200, file.read_bytes(), body=body, sha=path[3])

    def describe(self, repo, what):
        folder = self.server.root / repo
        files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        if not folder.is_dir():
            self.reply(404, b"{}")
        elif what[0] == "tree":
            rows = [{"type": "file", "path": f, "size": 1, "oid": "0" * 40} for f in files]
            self.reply(200, json.dumps(rows).encode())
        else:
            siblings = [{"rfilename": f} for f in files]
            about = {"id": repo, "sha": commit(folder), "siblings": siblings}
            self.reply(200, json.dumps(about).encode())

    def reply(self, status, content, *, body=True, sha=""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", sha)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.root, server.asked = tmp_path / "hub", []
    (server.root / "org").mkdir(parents=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def pull(hub, name, models):
    """`halogen pull` in its own process: the hub's address is read when the client is imported."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HALOGEN_"))}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(models / "hf-home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-m", "halogen_core.cli", "pull", "--models-dir", str(models), name]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_safetensors_repository_without_its_pickles(hub, tmp_path):
    folder = write_hf(hub.root / "org/tiny")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    done = pull(hub, "hf:org/tiny", tmp_path / "models")
    assert done.returncode == 0, done.stderr
    place = tmp_path / "models/hf/org--tiny"
    assert done.stdout.strip() == str(place)
    assert (place / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert not (place / "pytorch_model.bin").exists()
    assert "pytorch_model.bin" not in hub.asked


def test_one_gguf_is_found_several_must_be_named(hub, tmp_path):
    folder = hub.root / "org/quants"
    folder.mkdir()
    write_llama(folder / "a.gguf")
    assert pull(hub, "hf:org/quants", tmp_path / "models").returncode == 0
    write_llama(folder / "b.gguf")
    several = pull(hub, "hf:org/quants", tmp_path / "models")
    assert several.returncode == 2
    assert "HRT-2301" in several.stderr
    assert "a.gguf, b.gguf" in several.stderr
    named = pull(hub, "hf:org/quants:b.gguf", tmp_path / "models")
    assert named.stdout.strip().endswith("org--quants/b.gguf"), named.stderr


def test_shards_come_together(hub, tmp_path):
    folder = hub.root / "org/sharded"
    folder.mkdir()
    write_llama(folder / "m.gguf", split_max_tensors=7)
    first, *others = sorted(p.name for p in folder.iterdir())
    done = pull(hub, f"hf:org/sharded:{first}", tmp_path / "models")
    assert done.returncode == 0, done.stderr
    place = tmp_path / "models/hf/org--sharded"
    assert all((place / name).is_file() for name in [first, *others])


@pytest.mark.parametrize("name", ["hf:org/absent", "hf:org/empty:absent.gguf"])
def test_what_is_not_there_is_said(hub, tmp_path, name):
    (hub.root / "org/empty").mkdir()
    (hub.root / "org/empty/README.md").write_text("nothing")
    done = pull(hub, name, tmp_path / "models")
    assert done.returncode == 2
    assert "HRT-2303" in done.stderr
