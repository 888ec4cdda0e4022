"""API keys: every route needs one, except those that say that the server lives."""

from __future__ import annotations

from hmac import compare_digest
from pathlib import Path

from starlette.datastructures import Headers

from halogen_core.config import ServerSettings
from halogen_core.errors import ConfigError, RequestError

ADMIN_PATHS = "/admin/"
OPEN_PATHS = frozenset({"/health", "/ready"})


def read_keys(settings: ServerSettings) -> tuple[bytes, ...]:
    """All keys, from settings and from the key file; raises `ConfigError`."""
    keys = list(settings.api_key)
    if settings.api_key_file is not None:
        keys += _lines(settings.api_key_file)
        if not keys:
            raise ConfigError(
                f"`{settings.api_key_file}` holds no key", code="HRT-1002", fix="one key a line"
            )
    return tuple(key.encode() for key in keys)


def check_key(keys: tuple[bytes, ...], path: str, headers: Headers) -> None:
    """Raise `RequestError` (HRT-4010) unless one of `keys` was sent, or none is needed."""
    if not keys or path in OPEN_PATHS:
        return
    sent = _sent_keys(headers)
    # every key is compared, so that the time tells nothing about which one was near
    if len(sent) == 1 and sum(compare_digest(sent[0], key) for key in keys):
        return
    what = "no API key was sent" if not sent else "the API key is wrong"
    if len(sent) > 1:
        what = "more than one API key was sent"
    raise RequestError(
        what, code="HRT-4010", fix="send one as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    )


def check_admin_key(key: str | None, headers: Headers) -> None:
    """Raise `RequestError` (HRT-4030) unless the admin key was sent; a user's key is not enough."""
    sent = _sent_keys(headers)
    if key and len(sent) == 1 and compare_digest(sent[0], key.encode()):
        return
    raise RequestError(
        "this route is for the server's operator",
        code="HRT-4030",
        fix="send the key of --admin-key as `Authorization: Bearer KEY`",
    )


def _sent_keys(headers: Headers) -> list[bytes]:
    found = [key.encode() for key in headers.getlist("x-api-key")]
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            found.append(key.strip().encode())
    return found


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"key file `{path}` cannot be read: {exc}", code="HRT-1004") from exc
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
