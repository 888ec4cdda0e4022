"""The routes, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from halogen_core.errors import RequestError
from halogen_core.server import info_routes
from halogen_core.server import tokenize as tokens
from halogen_core.server.admin import admin_routes
from halogen_core.server.auth import read_keys
from halogen_core.server.chat import chat_completions
from halogen_core.server.completions import completions
from halogen_core.server.errors import MethodNotAllowed
from halogen_core.server.gate import Gate
from halogen_core.server.openai_models import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from halogen_core.server.origins import read_origins
from halogen_core.server.routes import Routes, described, with_plugins
from halogen_core.server.service import Service

if TYPE_CHECKING:
    from fastapi import APIRouter


def create_app(service: Service, extensions: Sequence[APIRouter] = ()) -> Starlette:
    """The whole HTTP application for one service; `extensions` are routes of plugins."""
    settings = service.config.server
    routes = Routes()
    routes.include(info_routes_of(service))
    routes.include(generation_routes(service))
    if settings.metrics and settings.metrics_port is None:
        routes.include(metrics_routes(service))
    if settings.admin_key is not None:
        routes.include(admin_routes(service))
    foreign = [router for router in extensions if router.routes]

    async def openapi(request: Request) -> Response:
        return info_routes.json_response(await asyncio.to_thread(described, routes, foreign))

    app = with_plugins(foreign) if foreign else Starlette()
    app.router.routes[:0] = routes.served()
    app.add_route("/openapi.json", openapi)
    app.add_exception_handler(HTTPException, _raise_ours)
    app.add_middleware(Gate, settings=settings, keys=read_keys(settings), metrics=service.metrics)
    if settings.cors_origins:
        origins = read_origins(settings)
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins.listed),
            allow_origin_regex=origins.pattern,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def info_routes_of(service: Service) -> Routes:
    """Routes that tell about the server."""
    routes = Routes()

    @routes.get("/health")
    async def health(request: Request) -> Response:
        return await info_routes.health()

    @routes.get("/ready")
    async def ready(request: Request) -> Response:
        return await info_routes.ready(service)

    @routes.get("/v1/status")
    async def status(request: Request) -> Response:
        return await info_routes.status(service)

    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        return await info_routes.models(service)

    @routes.get("/v1/models/{name:path}")
    async def model(request: Request) -> Response:
        return await info_routes.model(service, request.path_params["name"])

    @routes.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> Response:
        return await tokens.tokenizer_info(service)

    return routes


def generation_routes(service: Service) -> Routes:
    """Routes that take a body; it is parsed by msgspec."""
    routes = Routes()

    @routes.post("/v1/chat/completions", ChatBody)
    async def chat_route(request: Request) -> Response:
        return await chat_completions(service, request)

    @routes.post("/v1/completions", CompletionBody)
    async def completions_route(request: Request) -> Response:
        return await completions(service, request)

    @routes.post("/tokenize", TokenizeBody)
    async def tokenize_route(request: Request) -> Response:
        return await tokens.tokenize(service, request)

    @routes.post("/detokenize", DetokenizeBody)
    async def detokenize_route(request: Request) -> Response:
        return await tokens.detokenize(service, request)

    return routes


def metrics_routes(service: Service) -> Routes:
    """`/metrics`, here or on a port of its own."""
    routes = Routes()

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        return await info_routes.metrics(service)

    return routes


async def _raise_ours(request: Request, exc: Exception) -> Response:
    """Starlette's own errors (no such route, wrong method) as ours; `Gate` answers them."""
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        raise MethodNotAllowed(request.method, ", ".join(_methods(request)))
    if status == HTTPStatus.NOT_FOUND:
        raise RequestError(
            f"no such route: {request.method} {request.url.path[:200]}",
            code="HRT-4040",
            fix="routes: GET /v1/models, POST /v1/chat/completions, POST /v1/completions",
        )
    raise RequestError(f"the request failed with status {status}")


def _methods(request: Request) -> list[str]:
    """The methods of all routes of this path; Starlette's own error names those of the first."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)
