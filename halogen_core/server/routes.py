"""A table of routes: Starlette serves it, FastAPI describes it, and only when somebody asks.

FastAPI and pydantic take a quarter of a second to import, a third of what the server needs to
start; they do so when `/openapi.json` is read or where a plugin brings routes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halogen_core import __version__

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI

Endpoint = Callable[[Request], Awaitable[Response]]


@attrs.frozen
class Entry:
    """One route; `body` is the msgspec struct that it takes."""

    method: str
    path: str
    endpoint: Endpoint
    body: type | None = None


@attrs.define
class Routes:
    """Routes under a common prefix, in the order in which they are tried."""

    prefix: str = ""
    entries: list[Entry] = attrs.field(factory=list)

    def get(self, path: str) -> Callable[[Endpoint], Endpoint]:
        return self._adder("GET", path)

    def post(self, path: str, body: type | None = None) -> Callable[[Endpoint], Endpoint]:
        return self._adder("POST", path, body)

    def patch(self, path: str) -> Callable[[Endpoint], Endpoint]:
        return self._adder("PATCH", path)

    def include(self, other: Routes) -> None:
        self.entries += other.entries

    def served(self) -> list[Route]:
        """As Starlette takes them."""
        return [Route(e.path, e.endpoint, methods=[e.method]) for e in self.entries]

    def _adder(
        self, method: str, path: str, body: type | None = None
    ) -> Callable[[Endpoint], Endpoint]:
        def add(endpoint: Endpoint) -> Endpoint:
            self.entries.append(Entry(method, self.prefix + path, endpoint, body))
            return endpoint

        return add


def with_plugins(routers: Sequence[APIRouter]) -> FastAPI:
    """An application that serves what plugins add."""
    from fastapi import FastAPI

    app = FastAPI(
        title="halogen", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    for router in routers:
        app.include_router(router)
    return app


def described(routes: Routes, routers: Sequence[APIRouter]) -> dict[str, Any]:
    """The OpenAPI document of our routes and those of plugins."""
    app = with_plugins(())
    for entry in routes.entries:
        app.add_api_route(
            entry.path,
            _documented(entry),
            methods=[entry.method],
            openapi_extra=_described(entry),
        )
    for router in routers:
        app.include_router(router)
    return app.openapi()


def _documented(entry: Entry) -> Callable[[], Awaitable[None]]:
    """A function with the endpoint's name; FastAPI would read parameters out of others."""

    async def endpoint() -> None: ...

    endpoint.__name__, endpoint.__doc__ = entry.endpoint.__name__, entry.endpoint.__doc__
    return endpoint


def _described(entry: Entry) -> dict[str, Any]:
    """Parameters of the path and the msgspec body, as OpenAPI writes them."""
    names = re.findall(r"{(\w+)", entry.path)
    text = {"in": "path", "required": True, "schema": {"type": "string"}}
    out: dict[str, Any] = {"parameters": [{"name": name} | text for name in names]} if names else {}
    if entry.body is not None:
        template = "#/$defs/{name}"
        (schema,), parts = msgspec.json.schema_components([entry.body], ref_template=template)
        content = {"application/json": {"schema": schema | {"$defs": parts}}}
        out["requestBody"] = {"required": True, "content": content}
    return out
