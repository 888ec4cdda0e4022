"""What a web page in somebody's browser can do with a server on their machine."""

import json

import httpx
import pytest

from halogen_core.config import ServerSettings
from halogen_core.errors import ConfigError
from halogen_core.server.origins import listens_here_only, read_origins

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
SIMPLE = {"content-type": "text/plain"}
"""A POST with this type is sent without asking the server first."""
LOCAL_PAGES = (
    "http://localhost:3000",
    "http://localhost",
    "https://127.0.0.1:8443",
    "http://[::1]:5173",
    "app://obsidian.md",
    "tauri://localhost",
)
OTHERS = (
    "https://evil.example",
    "http://localhost.evil.example",
    "http://127.0.0.1.evil.example:8000",
    "http://evil.example/http://localhost",
    "http://192.168.1.7:3000",
    "chrome-extension://abcdefghijklmnop",
    "http://[::1",
    "null",
    "",
)


@pytest.fixture(scope="module")
def open_server(serve):
    """Without keys, as `halogen serve` starts."""
    with serve("x") as server:
        yield server


def ask(server, **headers):
    """A simple cross-site request, as a page's script would make it."""
    sent = SIMPLE | {name.replace("_", "-"): value for name, value in headers.items()}
    return server.client.post(server.url + CHAT, content=json.dumps(HI), headers=sent)


def is_refused(response):
    if response.status_code != 403:
        return False
    error = response.json()["error"]
    assert error["code"] == "origin_not_allowed"
    assert error["hrt_code"] == "HRT-4031"
    assert "cors_origins" in error["message"]
    assert "access-control-allow-origin" not in response.headers
    return True


@pytest.mark.parametrize("origin", OTHERS)
def test_pages_of_others_compute_nothing(open_server, origin):
    before = len(open_server.engine.requests)
    assert is_refused(ask(open_server, origin=origin))
    assert is_refused(ask(open_server, origin=origin, sec_fetch_site="same-origin"))
    assert len(open_server.engine.requests) == before


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_browser_that_hides_the_origin_is_no_program(open_server, site):
    assert is_refused(ask(open_server, sec_fetch_site=site))


def test_a_page_is_refused_before_its_body_is_read(open_server):
    sent = SIMPLE | {"origin": OTHERS[0]}
    assert is_refused(open_server.post(CHAT, b"x" * 9_000_000, headers=sent))


@pytest.mark.parametrize("origin", LOCAL_PAGES)
def test_pages_of_this_machine_may_ask_and_read(open_server, origin):
    answer = ask(open_server, origin=origin, sec_fetch_site="same-site")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    wanted = {"origin": origin, "access-control-request-method": "POST"}
    preflight = open_server.client.options(open_server.url + CHAT, headers=wanted)
    assert preflight.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "application/json",
        "application/json; charset=utf-8",
        "application/x-www-form-urlencoded",  # curl -d
        "text/plain",
    ],
)
def test_programs_send_what_content_type_they_like(open_server, kind):
    request = httpx.Request("POST", open_server.url + CHAT, content=json.dumps(HI))
    assert "content-type" not in request.headers
    if kind:
        request.headers["content-type"] = kind
    assert open_server.client.send(request).status_code == 200


def test_a_page_of_the_server_itself_may_ask_it(open_server):
    own = open_server.url
    assert ask(open_server, origin=own, sec_fetch_site="same-origin").status_code == 200


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example", "EVIL.example."])
def test_a_name_that_was_pointed_at_us_opens_nothing(open_server, name):
    port = open_server.url.rpartition(":")[2]
    host = {"host": f"{name}:{port}"}
    assert is_refused(ask(open_server, origin=f"http://{name}:{port}", **host))
    assert is_refused(open_server.get("/v1/models", headers=host))
    assert is_refused(open_server.get("/metrics", headers=host))
    assert open_server.get("/health", headers=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1:80", "[::1]:8000", "host.docker.internal:8000", "box", "a.local"],
)
def test_names_that_nobody_can_register_are_ours(open_server, host):
    assert open_server.get("/v1/models", headers={"host": host}).status_code == 200


def test_a_server_for_others_has_any_name_but_pages_must_be_listed(serve):
    host = {"host": "llm.example.org"}
    with serve("x", host="0.0.0.0") as server:
        assert server.post(CHAT, HI, headers=host).status_code == 200
        # the same for a page under our name: that name may be anybody's, who points it here
        assert is_refused(ask(server, origin="http://llm.example.org", **host))


def test_pages_that_were_listed_may_ask_and_no_others(serve):
    page = "https://chat.example.org"
    with serve("x", cors_origins=(page,)) as server:
        answer = ask(server, origin=page)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == page
        # its name is known too: a proxy may pass it on
        assert server.get("/v1/models", headers={"host": "chat.example.org"}).status_code == 200
        for other in ("http://chat.example.org", page + ":8443", LOCAL_PAGES[0]):
            assert is_refused(ask(server, origin=other)), other
    with serve("x", cors_origins=("*",)) as server:
        for origin in (*OTHERS[:3], "null"):
            assert ask(server, origin=origin).status_code == 200
        assert server.get("/v1/models", headers={"host": "evil.example"}).status_code == 200
    assert not read_origins(ServerSettings(cors_origins=())).allow(LOCAL_PAGES[0])


def test_a_key_is_leave_enough_and_cors_says_who_reads(serve):
    page = {"origin": LOCAL_PAGES[0]}
    with serve("x", api_key=("k",)) as server:
        key = {"authorization": "Bearer k"}
        answer = server.post(
            CHAT, HI, headers=key | {"origin": OTHERS[0], "host": "llm.example.org"}
        )
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
        refused = server.post(CHAT, HI, headers=page)  # the page may read why, and when to retry
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == page["origin"]
        assert "retry-after" in refused.headers["access-control-expose-headers"]
        assert server.post(CHAT, HI, headers={"origin": OTHERS[0]}).status_code == 401


@pytest.mark.parametrize(
    "word", ["example.org", "https://example.org/", "https://example.org/chat", "null", "https://"]
)
def test_origins_that_no_browser_sends_are_refused_at_start(word):
    with pytest.raises(ConfigError, match="cors_origins") as caught:
        read_origins(ServerSettings(cors_origins=(word,)))
    assert caught.value.code == "HRT-1002"


def test_where_only_this_machine_is_listened_to(tmp_path):
    here = {"127.0.0.1": True, "::1": True, "localhost": True}
    for host, expected in (here | {"0.0.0.0": False, "::": False, "box": False}).items():
        assert listens_here_only(ServerSettings(host=host)) is expected, host
    assert not listens_here_only(ServerSettings(unix_socket=tmp_path / "s"))
