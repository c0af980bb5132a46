"""No body larger than the limit is read, whatever its headers say of it."""

from __future__ import annotations

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferscale.serve.errors import ApiError


class BodyLimit:
    """ASGI middleware: answers 413 to a body of more than `limit` bytes."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._limit:
            error = self._too_large()
            await JSONResponse(error.body, error.status_code, error.headers)(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._limit:,} bytes.", code="body_too_large")
