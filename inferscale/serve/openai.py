"""OpenAI's routes: /v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from inferscale.answer import Reply, ReplyStream
from inferscale.errors import InvalidInput
from inferscale.memory import Memory
from inferscale.serve.answers import Answer
from inferscale.serve.errors import ApiError, as_api_error
from inferscale.serve.gateway import Gateway
from inferscale.serve.wire import CHAT_TOKENS, COMPLETION_TOKENS, ChatBody, CompletionBody

CLOSED = 499
"""Status, for the metrics only, of a request whose client left."""


def routes(gateway: Gateway) -> APIRouter:
    """OpenAI's routes to one gateway."""
    router = APIRouter(prefix="/v1")

    @router.post("/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        memory = gateway.memory_of(request.headers.get("authorization"))
        messages = [message.shown for message in body.messages]
        start = partial(memory.stream, messages, sampling=body.sampling(CHAT_TOKENS), **body.options)
        return await _answer(gateway, memory, body, request, start, CHAT, messages[-1])

    @router.post("/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        memory = gateway.memory_of(request.headers.get("authorization"))
        start = partial(memory.complete, body.text, sampling=body.sampling(COMPLETION_TOKENS), **body.options)
        said = {"role": "user", "content": body.text}
        return await _answer(gateway, memory, body, request, start, TEXT, said)

    @router.get("/models")
    async def models(request: Request) -> Response:
        gateway.memory_of(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": [_model(gateway)]})

    @router.get("/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        gateway.memory_of(request.headers.get("authorization"))
        _require_model(gateway, name)
        return JSONResponse(_model(gateway))

    return router


@dataclass(frozen=True, slots=True)
class _Shape:
    """How one of the two routes shows an answer."""

    prefix: str
    whole: str
    part: str
    message: Callable[[str], dict[str, Any]]
    opening: dict[str, Any] | None
    delta: Callable[[str], dict[str, Any]]


CHAT = _Shape(
    prefix="chatcmpl",
    whole="chat.completion",
    part="chat.completion.chunk",
    message=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": None},
    opening={"delta": {"role": "assistant", "content": ""}},
    delta=lambda text: {"delta": {"content": text} if text else {}},
)
TEXT = _Shape(
    prefix="cmpl",
    whole="text_completion",
    part="text_completion",
    message=lambda text: {"text": text, "logprobs": None},
    opening=None,
    delta=lambda text: {"text": text, "logprobs": None},
)


async def _answer(
    gateway: Gateway,
    memory: Memory,
    body: ChatBody | CompletionBody,
    request: Request,
    start: Callable[[], ReplyStream],
    shape: _Shape,
    said: dict[str, str],
) -> Response:
    _require_model(gateway, body.model)
    if body.memory.add and not body.owners:
        raise InvalidInput("memory.add needs somebody whose memory it is; pass user, memory.agent_id or memory.run_id.")
    answer = await gateway.answer(start)

    def done(reply: Reply) -> None:
        gateway.metrics.answered(reply)
        if body.memory.add:
            gateway.remember(memory, said, body.owners)

    head = {"id": f"{shape.prefix}-{uuid4().hex}", "created": int(time.time()), "model": gateway.model}
    if body.stream:
        return _Stream(_events(answer, {**head, "object": shape.part}, shape, body.wants_usage, done), answer)
    try:
        async for item in answer.pieces():
            if isinstance(item, Reply):
                done(item)
                return JSONResponse(_whole({**head, "object": shape.whole}, shape, item))
            if await request.is_disconnected():
                break
    finally:
        answer.close()
    return Response(status_code=CLOSED)


class _Stream(StreamingResponse):
    """Server-sent events; the answer is closed even if the client left before the first of them."""

    def __init__(self, events: AsyncIterator[str], answer: Answer) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


async def _events(
    answer: Answer, head: dict[str, Any], shape: _Shape, usage: bool, done: Callable[[Reply], None]
) -> AsyncIterator[str]:
    def event(choice: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        return _event({**head, "choices": [{"index": 0, **choice, "finish_reason": finish}], **more})

    try:
        if shape.opening is not None:
            yield event(shape.opening)
        async for item in answer.pieces():
            if isinstance(item, str):
                yield event(shape.delta(item))
                continue
            done(item)
            yield event(shape.delta(""), item.finish_reason, **_extras(item))
            if usage:
                yield _event({**head, "choices": [], "usage": _usage(item)})
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status is sent already: the client learns of it here
        yield _event(as_api_error(error).body)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _whole(head: dict[str, Any], shape: _Shape, reply: Reply) -> dict[str, Any]:
    choice = {"index": 0, **shape.message(reply.text), "finish_reason": reply.finish_reason}
    return {**head, "choices": [choice], "usage": _usage(reply), **_extras(reply)}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.injected_tokens},
    }


def _extras(reply: Reply) -> dict[str, Any]:
    """What an answer says beyond OpenAI's form: the memories in its prompt, the best one last, and seconds."""
    return {
        "memory": {
            "mode": reply.mode,
            "used": reply.memories,
            "injected_tokens": reply.injected_tokens,
            "text_memories": reply.text_memories,
            "fallback": reply.fallback,
        },
        "timings": {name: round(seconds, 6) for name, seconds in reply.timings.items()},
    }


def _model(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.model,
        "object": "model",
        "created": 0,
        "owned_by": "inferscale",
        "max_model_len": gateway.context,
    }


def _require_model(gateway: Gateway, name: str) -> None:
    if name != gateway.model:
        raise ApiError(404, f"This server has the model {gateway.model!r} and no other.", code="model_not_found")
