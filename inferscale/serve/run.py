"""Serve the application until the process is told to stop; then finish the streams, then return."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from inferscale.config import ServeConfig
from inferscale.errors import ConfigError

BACKLOG = 2048


def listen(config: ServeConfig) -> socket.socket:
    """The socket to serve on; ConfigError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((config.host, config.port))
        server.listen(BACKLOG)
    except OSError as error:
        server.close()
        raise ConfigError(
            f"Cannot listen on {config.host}:{config.port} ({error.strerror}); pass another --port or --host."
        ) from None
    return server


def serve(app: FastAPI, config: ServeConfig, server: socket.socket, on_ready: Callable[[str], None]) -> None:
    """Serve on `server` until SIGINT or SIGTERM, then at most `drain_seconds` more; call from the main thread.

    `on_ready` gets the address once requests are answered.
    """
    host, port = server.getsockname()[:2]
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
    )
    with _signals_survived():
        _Server(settings, lambda: on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")).run([server])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


@contextmanager
def _signals_survived() -> Iterator[None]:
    """uvicorn raises a signal again once it has shut down; the memory and vLLM must still be closed after that."""

    def ignored(number: int, frame: FrameType | None) -> None:
        pass

    before = {kind: signal.signal(kind, ignored) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
