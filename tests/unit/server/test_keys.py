"""Keys: every route needs one but those that say that the server lives."""

import pytest

from halogen_core.config import ServerSettings
from halogen_core.errors import ConfigError
from halogen_core.server.admin import make_room
from halogen_core.server.auth import read_keys

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-correct-horse"


@pytest.fixture(scope="module")
def locked(serve, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# the second\nsk-other\n\n")
    with serve("secret", api_key=(KEY,), api_key_file=str(path)) as server:
        yield server


def test_every_route_needs_a_key_but_those_that_say_it_lives(locked):
    key = {"authorization": f"Bearer {KEY}"}
    paths = locked.get("/openapi.json", headers=key).json()["paths"]
    assert CHAT in paths
    assert "/metrics" in paths
    for path, methods in {**paths, "/openapi.json": {"get": {}}, "/none": {"get": {}}}.items():
        for method in methods:
            response = locked.client.request(method, locked.url + path.replace("{name}", "x"))
            expected = 200 if path in ("/health", "/ready") else 401
            assert response.status_code == expected, path
    assert locked.engine.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY}"},
        {"x-api-key": KEY},
        {"authorization": "Bearer sk-other"},
    ],
)
def test_right_keys(locked, headers):
    assert locked.post(CHAT, HI, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Bearer {KEY}x"},
        {"x-api-key": ""},
        {"x-api-key": "ключ".encode()},
        {"x-api-key": KEY, "authorization": f"Bearer {KEY}"},
        [("x-api-key", KEY), ("x-api-key", "other")],
    ],
)
def test_wrong_keys(locked, headers):
    response = locked.post(CHAT, HI, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert KEY not in response.text


def test_a_key_is_checked_before_the_body_is_read(locked):
    response = locked.post(CHAT, b"x" * 9_000_000)
    assert response.status_code == 401


def test_key_files_must_hold_keys(tmp_path):
    (tmp_path / "empty").write_text("# none\n")
    for name, code in (("empty", "HRT-1002"), ("missing", "HRT-1004")):
        with pytest.raises(ConfigError) as caught:
            read_keys(ServerSettings(api_key_file=tmp_path / name))
        assert caught.value.code == code


def test_a_snapshot_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory") as caught:
        make_room(tmp_path / "file" / "snapshots")
    assert caught.value.code == "HRT-3311"


def test_admin_routes_exist_only_with_an_admin_key_and_only_for_it(serve, locked):
    body = {"name": "x"}
    user = {"authorization": f"Bearer {KEY}"}
    assert locked.post("/admin/kv/dump", body, headers=user).status_code == 403
    assert locked.post("/admin/kv/dump", body).status_code == 403
    with serve("x", admin_key="root", api_key=("user",)) as server:
        for key, status in (("user", 403), ("wrong", 403), ("", 403), ("root", 400)):
            response = server.post("/admin/kv/dump", body, headers={"x-api-key": key})
            assert response.status_code == status, key
        # the engine of these tests keeps no cache, which is said after the key was right
        assert "keeps no cache" in response.json()["error"]["message"]
        path = {"name": "../../etc/passwd"}
        refused = server.post("/admin/kv/load", path, headers={"x-api-key": "root"})
        assert refused.json()["error"]["param"] == "name"
        assert server.post(CHAT, HI, headers={"x-api-key": "root"}).status_code == 401


def test_settings_of_the_backend_are_the_operators(serve):
    with serve("x", admin_key="root", api_key=("user",)) as server:
        for key, status in (("user", 403), ("root", 400)):
            response = server.get("/admin/backend", headers={"x-api-key": key})
            assert response.status_code == status, key
        assert "no settings to change" in response.json()["error"]["message"]
        other = server.client.delete(server.url + "/admin/backend", headers={"x-api-key": "root"})
        assert (other.status_code, other.headers["allow"]) == (405, "GET, HEAD, PATCH")
