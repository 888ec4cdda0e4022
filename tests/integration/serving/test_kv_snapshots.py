"""The prefix cache survives a restart: by hand (`halogen kv`) and by itself on drain."""

import pytest
from click.testing import CliRunner

from halogen_core.cli.main import main

LONG = [{"role": "user", "content": "The river runs to the sea. " * 12}]
ADMIN = "operator-key"


def cached_tokens(server):
    body = {"messages": LONG, "temperature": 0}
    answer = server.chat(**body).json()
    text = answer["choices"][0]["message"]["content"]
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], text


def kv(server, what, name, key=ADMIN):
    flags = ("--url", server.url, "--admin-key", key)
    return CliRunner().invoke(main, ["kv", what, name, *flags])


@pytest.mark.slow
def test_a_cache_is_kept_over_a_restart(serve_process, tmp_path):
    file = tmp_path / "auto.kv"
    flags = ("--admin-key", ADMIN, "--kv-snapshot", str(file), "--cache-dir", str(tmp_path))
    server = serve_process(*flags)
    cold, text = cached_tokens(server)
    assert cold == 0
    assert "blocks written" in kv(server, "dump", "by-hand").output
    for path in ("../escape", "a/b", "", ".hidden", "x" * 200):
        refused = kv(server, "dump", path)
        assert refused.exit_code == 2, refused.output
    assert sorted(p.name for p in (tmp_path / "snapshots").iterdir()) == ["by-hand.kv"]
    assert "HRT-4030" in kv(server, "dump", "x", key="wrong").stderr
    assert server.stop() == 0
    assert file.exists()

    server = serve_process(*flags)
    warm, again = cached_tokens(server)
    assert warm > 200
    assert again == text
    damaged = tmp_path / "snapshots" / "damaged.kv"
    data = bytearray((tmp_path / "snapshots" / "by-hand.kv").read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    refused = kv(server, "load", "damaged")
    assert refused.exit_code == 2
    assert "HRT-3310" in refused.stderr
    assert cached_tokens(server) == (warm, text)
    assert server.stop() == 0

    file.write_bytes(b"not a snapshot")
    server = serve_process(*flags)
    assert "starts empty" in "".join(server.lines)
    assert cached_tokens(server) == (0, text)
    assert "blocks read" in kv(server, "load", "by-hand").output
    assert cached_tokens(server) == (warm, text)
    assert server.stop() == 0
