"""A gateway over the tiny engine, served by uvicorn on a real socket, and clients for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from inferscale import Memory
from inferscale.config import ServeConfig
from inferscale.engine.transformers import TransformersEngine
from inferscale.index.embed import SentenceTransformerEmbedder
from inferscale.serve import ApiKeys, create_app, listen

LINES = ["Rex is a collie.", "Tom lives in Lisbon.", "Ana plays the cello."]


def until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait for something to become true; whether it did."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


@dataclass
class Served:
    """A gateway that answers at `url`."""

    url: str
    memory: Memory
    clients: ExitStack = field(default_factory=ExitStack)

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.clients.enter_context(httpx.Client(base_url=self.url, headers=headers, timeout=60))

    @cached_property
    def openai(self) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60)
        return self.clients.enter_context(client)

    @property
    def model(self) -> str:
        return self.memory.engine.spec.name

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@contextmanager
def served(
    memory: Memory,
    keys: Mapping[str, str] | None = None,
    health: Callable[[], str | None] | None = None,
    **config: Any,
) -> Iterator[Served]:
    """Serve `memory` from a thread until the end of the `with`."""
    settings = ServeConfig(port=0, **config)
    with listen(settings) as socket:
        app = create_app(memory, settings, ApiKeys(keys or {}), health)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=30))
        thread = threading.Thread(target=server.run, args=([socket],))
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        gateway = Served(f"http://127.0.0.1:{socket.getsockname()[1]}", memory)
        try:
            with gateway.clients:
                yield gateway
        finally:
            server.should_exit = True
            thread.join(60)


Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def serve_memory(
    tmp_path_factory: pytest.TempPathFactory, tiny_engine: TransformersEngine, embedder: SentenceTransformerEmbedder
) -> Iterator[Serve]:
    """Serve a new memory, with any options of `served`; all of them end with the tests."""
    with ExitStack() as stack:

        def serve(path: Path | None = None, **options: Any) -> Served:
            where = path or tmp_path_factory.mktemp("served")
            memory = stack.enter_context(Memory(tiny_engine, where, embedder=embedder))
            return stack.enter_context(served(memory, **options))

        yield serve


@pytest.fixture(scope="session")
def gateway(serve_memory: Serve) -> Served:
    """An open gateway in which alice has three memories."""
    gateway = serve_memory()
    for line in LINES:
        gateway.memory.add(line, user_id="alice")
    gateway.memory.flush()
    return gateway
