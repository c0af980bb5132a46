"""Mem0's REST routes: /memories and /search."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from inferscale.errors import MemoryNotFound
from inferscale.memory import Memory
from inferscale.serve.gateway import Gateway
from inferscale.serve.wire import AddBody, ListQuery, Owners, SearchBody, UpdateBody


def routes(gateway: Gateway) -> APIRouter:
    """Mem0's routes to one gateway."""
    router = APIRouter()

    def memory_of(request: Request) -> Memory:
        return gateway.memory_of(request.headers.get("authorization"))

    async def answer(work: Any, *args: Any, **keywords: Any) -> JSONResponse:
        return JSONResponse(await gateway.call(work, *args, **keywords))

    @router.post("/memories")
    async def add(body: AddBody, request: Request) -> JSONResponse:
        return await answer(memory_of(request).add, **body.model_dump())

    @router.get("/memories")
    async def get_all(query: Annotated[ListQuery, Query()], request: Request) -> JSONResponse:
        return await answer(memory_of(request).get_all, top_k=query.top_k, **query.given)

    @router.delete("/memories")
    async def delete_all(query: Annotated[Owners, Query()], request: Request) -> JSONResponse:
        return await answer(memory_of(request).delete_all, **query.given)

    @router.get("/memories/{memory_id}")
    async def get(memory_id: str, request: Request) -> JSONResponse:
        found = await gateway.call(memory_of(request).get, memory_id)
        if found is None:
            raise MemoryNotFound(f"There is no memory {memory_id!r}.")
        return JSONResponse(found)

    @router.put("/memories/{memory_id}")
    async def update(memory_id: str, body: UpdateBody, request: Request) -> JSONResponse:
        return await answer(memory_of(request).update, memory_id, **body.model_dump())

    @router.delete("/memories/{memory_id}")
    async def delete(memory_id: str, request: Request) -> JSONResponse:
        return await answer(memory_of(request).delete, memory_id)

    @router.get("/memories/{memory_id}/history")
    async def history(memory_id: str, request: Request) -> JSONResponse:
        return await answer(memory_of(request).history, memory_id)

    @router.post("/search")
    async def search(body: SearchBody, request: Request) -> JSONResponse:
        return await answer(memory_of(request).search, **body.model_dump())

    return router
