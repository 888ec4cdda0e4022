"""Routes that tell about the server: health, readiness, models, metrics."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from starlette.responses import Response

from halogen_core import __version__
from halogen_core.engine.protocol import EngineInfo, EngineStats
from halogen_core.errors import EngineUnavailable
from halogen_core.server.service import Service

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def json_response(data: Any) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


async def health() -> Response:
    """The process is up; says nothing of the engine."""
    return json_response({"status": "ok"})


async def ready(service: Service) -> Response:
    """Whether a request would be served now; asks the engine's step loop."""
    service.refuse_if_draining()
    await service.engine.check()
    stats = await service.engine.stats()
    return json_response(
        {"status": "ready", "running": stats.running, "waiting": stats.waiting, "step": stats.step}
    )


async def status(service: Service) -> Response:
    """What runs where: the memory plan, the placement of every op, the queue (A50)."""
    info, stats = service.engine.info, await service.engine.stats()
    return json_response(
        {
            "halogen": __version__,
            "engine": msgspec.to_builtins(info),
            "stats": msgspec.to_builtins(stats),
            "admission": {"inside": service.admission.inside, "limit": service.admission.limit},
        }
    )


async def models(service: Service) -> Response:
    """The names this server answers to."""
    cards = [model_card(service, name) for name in service.model_names]
    return json_response({"object": "list", "data": cards})


async def model(service: Service, name: str) -> Response:
    """One model; raises `RequestError` (HRT-4007)."""
    return json_response(model_card(service, service.check_model(name)))


def model_card(service: Service, name: str) -> dict[str, Any]:
    info = service.engine.info
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "halogen",
        "root": info.model_id,
        "parent": None,
        "max_model_len": info.context_length,
    }


async def metrics(service: Service) -> Response:
    """Prometheus text; the engine's part is missing while there is no engine."""
    stats: EngineStats | None = None
    info: EngineInfo | None = None
    with contextlib.suppress(EngineUnavailable):
        stats = await service.engine.stats()
        info = service.engine.info
    compatible = service.config.server.metrics_compat == "vllm" and info is not None
    text = service.metrics.exposition(
        info, stats, vllm_model=service.model_names[0] if compatible else None
    )
    return Response(text, media_type=EXPOSITION)
