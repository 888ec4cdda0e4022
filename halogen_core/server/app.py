"""The routes, put together."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from halogen_core import __version__
from halogen_core.errors import RequestError
from halogen_core.server import info_routes
from halogen_core.server import tokenize as tokens
from halogen_core.server.admin import admin_router
from halogen_core.server.auth import read_keys
from halogen_core.server.chat import chat_completions
from halogen_core.server.completions import completions
from halogen_core.server.gate import Gate
from halogen_core.server.openai_models import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from halogen_core.server.service import Service


def create_app(service: Service, extensions: Sequence[APIRouter] = ()) -> FastAPI:
    """The whole HTTP application for one service; `extensions` are routes of plugins."""
    settings = service.config.server
    app = FastAPI(title="halogen", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(info_router(service))
    app.include_router(generation_router(service))
    if settings.metrics and settings.metrics_port is None:
        app.include_router(metrics_router(service))
    if settings.admin_key is not None:
        app.include_router(admin_router(service))
    for router in extensions:
        app.include_router(router)
    app.add_exception_handler(HTTPException, _raise_ours)
    app.add_middleware(Gate, settings=settings, keys=read_keys(settings), metrics=service.metrics)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


def info_router(service: Service) -> APIRouter:
    """Routes that tell about the server."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return await info_routes.health()

    @router.get("/ready")
    async def ready() -> Response:
        return await info_routes.ready(service)

    @router.get("/v1/status")
    async def status() -> Response:
        return await info_routes.status(service)

    @router.get("/v1/models")
    async def models() -> Response:
        return await info_routes.models(service)

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return await info_routes.model(service, name)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return await tokens.tokenizer_info(service)

    return router


def generation_router(service: Service) -> APIRouter:
    """Routes that take a body; it is parsed by msgspec, not by FastAPI."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=_body(ChatBody))
    async def chat_route(request: Request) -> Response:
        return await chat_completions(service, request)

    @router.post("/v1/completions", openapi_extra=_body(CompletionBody))
    async def completions_route(request: Request) -> Response:
        return await completions(service, request)

    @router.post("/tokenize", openapi_extra=_body(TokenizeBody))
    async def tokenize_route(request: Request) -> Response:
        return await tokens.tokenize(service, request)

    @router.post("/detokenize", openapi_extra=_body(DetokenizeBody))
    async def detokenize_route(request: Request) -> Response:
        return await tokens.detokenize(service, request)

    return router


def metrics_router(service: Service) -> APIRouter:
    """`/metrics`, here or on a port of its own."""
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        return await info_routes.metrics(service)

    return router


def _body(kind: type) -> dict[str, Any]:
    """The OpenAPI description of a msgspec body."""
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema | {"$defs": parts}}},
        }
    }


async def _raise_ours(request: Request, exc: Exception) -> Response:
    """Starlette's own errors (no such route, wrong method) as ours; `Gate` answers them."""
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        raise RequestError(f"`{request.method}` is not allowed here", code="HRT-4050")
    if status == HTTPStatus.NOT_FOUND:
        raise RequestError(
            f"no such route: {request.method} {request.url.path[:200]}",
            code="HRT-4040",
            fix="routes: GET /v1/models, POST /v1/chat/completions, POST /v1/completions",
        )
    raise RequestError(f"the request failed with status {status}")
