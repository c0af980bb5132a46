"""The gateway's ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from inferscale import __version__
from inferscale.config import ServeConfig
from inferscale.memory import Memory
from inferscale.serve import errors, memories, openai
from inferscale.serve.gateway import Gateway
from inferscale.serve.keys import ApiKeys
from inferscale.serve.limits import BodyLimit
from inferscale.serve.metrics import CountRequests


def create_app(
    memory: Memory, config: ServeConfig, keys: ApiKeys, health: Callable[[], str | None] | None = None
) -> FastAPI:
    """The application; `health` as in `Gateway`. The memory stays the caller's to close."""
    gateway = Gateway(memory, config, keys, health)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(gateway.close)

    app = FastAPI(
        title="InferScale", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    errors.install(app)
    app.add_middleware(BodyLimit, limit=config.max_body_bytes)
    app.add_middleware(CountRequests, metrics=gateway.metrics)
    app.include_router(openai.routes(gateway))
    app.include_router(memories.routes(gateway))

    @app.get("/health")
    async def healthy() -> JSONResponse:
        reason = gateway.health()
        if reason is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": reason}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app
