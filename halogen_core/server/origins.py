"""Which web pages may use a server without keys.

A page that somebody visits can send requests to whatever their browser reaches, so also to a
server on their own machine: a POST as plain text needs nobody's leave. Browsers say whose page
asks (`Origin`, `Sec-Fetch-Site`) and under which name (`Host`); other programs do not, and pass.
ADR 0088; after `http.CrossOriginProtection` of Go 1.25.
"""

from __future__ import annotations

import re
from ipaddress import ip_address

import attrs
from starlette.datastructures import Headers

from halogen_core.config import ServerSettings
from halogen_core.errors import ConfigError, RequestError

LOCAL, ANY = "localhost", "*"
"""Words of `cors_origins` beside origins."""
LOCAL_PATTERN = (
    r"https?://(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?"
    # pages that a program brings with it; no website can call itself so
    r"|(app|file|tauri|vscode-file|vscode-webview)://.*"
)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_PRIVATE = (".localhost", ".local", ".internal", ".home.arpa", ".localdomain")
"""Ends of names that nobody can register."""
_FIX = "list the page's origin in server.cors_origins (--cors-origins), or set server.api_key"


@attrs.frozen(kw_only=True)
class Origins:
    """The pages that `cors_origins` lets in; `pattern` matches others than those in `listed`."""

    listed: tuple[str, ...]
    pattern: str | None

    def allow(self, origin: str) -> bool:
        if ANY in self.listed or origin in self.listed:
            return True
        return self.pattern is not None and re.fullmatch(self.pattern, origin) is not None

    def know(self, host: str) -> bool:
        """Whether a listed page has this host name."""
        return ANY in self.listed or host in {_host(_name_and_port(p)) for p in self.listed}


def read_origins(settings: ServerSettings) -> Origins:
    """`cors_origins`; raises `ConfigError` (HRT-1002) for what no browser would send."""
    for word in settings.cors_origins:
        if word not in (LOCAL, ANY) and not _ORIGIN.fullmatch(word):
            raise ConfigError(
                f"server.cors_origins has `{word}`; allowed are `scheme://host` or "
                f"`scheme://host:port`, `{LOCAL}` and `{ANY}`",
                code="HRT-1002",
                fix="write it as browsers do: `https://chat.example.org`, without a path",
            )
    listed = tuple(word for word in settings.cors_origins if word != LOCAL)
    local = LOCAL in settings.cors_origins
    return Origins(listed=listed, pattern=LOCAL_PATTERN if local else None)


def check_page(origins: Origins, headers: Headers) -> None:
    """Raise `RequestError` (HRT-4031) where a page asks that is neither ours nor allowed."""
    origin = headers.get("origin")
    if origin is None:
        if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            return
        raise _refused("web pages of others may not use this server")
    if origins.allow(origin):
        return
    # whose page it is says the name, unless a name can be pointed at us by anybody
    asked = headers.get("host", "").lower()
    if _name_and_port(origin) != asked or not asked or _public(_host(asked)):
        raise _refused(f"web pages of `{origin[:200]}` may not use this server")


def check_name(origins: Origins, headers: Headers) -> None:
    """Raise `RequestError` (HRT-4031) where a server of this machine is asked by a public name.

    Someone else's name may lead to us: their page is then ours in a browser's eyes, and may read
    what we answer (DNS rebinding).
    """
    name = _host(headers.get("host", "").lower())
    if _public(name) and not origins.know(name):
        raise RequestError(
            f"a server without keys that listens on this machine only was asked as `{name[:200]}`",
            code="HRT-4031",
            fix=f"ask 127.0.0.1 or localhost, list `https://{name[:200]}` in server.cors_origins, "
            "or set server.api_key",
        )


def listens_here_only(settings: ServerSettings) -> bool:
    """Whether only programs of this machine reach the TCP port."""
    if settings.unix_socket is not None:
        return False
    try:
        return ip_address(settings.host).is_loopback
    except ValueError:
        return settings.host.lower() == "localhost"


def _refused(text: str) -> RequestError:
    return RequestError(text, code="HRT-4031", fix=_FIX)


def _name_and_port(origin: str) -> str:
    return origin.partition("://")[2].lower()


def _host(name_and_port: str) -> str:
    return re.sub(r":\d*$", "", name_and_port).removesuffix(".")


def _public(name: str) -> bool:
    """Whether a name may be anybody's: not an address, and with a domain that can be registered."""
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return "." in name and not name.endswith(_PRIVATE)
    return False
