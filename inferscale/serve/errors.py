"""Every error leaves the gateway in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from inferscale.errors import (
    EmbeddingError,
    EngineUnavailable,
    InferScaleError,
    InvalidInput,
    MemoryNotFound,
    PromptTooLong,
    StoreBusy,
    StoreFull,
)

log = logging.getLogger("inferscale.serve")

_KNOWN = (
    (PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidInput, 400, "invalid_request_error", None),
    (MemoryNotFound, 404, "invalid_request_error", "memory_not_found"),
    (EngineUnavailable, 503, "api_error", "engine_unavailable"),
    (EmbeddingError, 503, "api_error", "embedding_failed"),
    (StoreBusy, 503, "api_error", "store_busy"),
    (StoreFull, 507, "api_error", "store_full"),
)
# Without the close, whoever sends too much could go on sending.
_HEADERS = {413: {"Connection": "close"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}
_NOT_OURS = "The server failed; its log says why."


class ApiError(HTTPException):
    """An answer that is an error; an HTTPException, so that FastAPI passes it on from anywhere."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None
    ) -> None:
        super().__init__(status, message, _HEADERS.get(status))
        self.kind = kind
        self.code = code
        self.param: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        error = {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def as_api_error(error: Exception) -> ApiError:
    """What a caller is told of `error`: what it can act on, and nothing of the server's inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    for known, status, kind, code in _KNOWN:
        if isinstance(error, known):
            return ApiError(status, str(error), kind=kind, code=code)
    log.error("unexpected %s", type(error).__name__, exc_info=error)
    own = str(error) if isinstance(error, InferScaleError) else _NOT_OURS
    return ApiError(500, own, kind="api_error", code="internal_error")


def install(app: FastAPI) -> None:
    """Let `app` answer errors so."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        shown = as_api_error(error)
        return JSONResponse(shown.body, shown.status_code, shown.headers)

    for kind in (HTTPException, RequestValidationError, InferScaleError, Exception):
        app.add_exception_handler(kind, answer)


def _of_validation(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}.")
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    name = ".".join(place)
    what = "is not known" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    shown = ApiError(400, f"{name}: {what}" if name else what)
    shown.param = name or None
    return shown
