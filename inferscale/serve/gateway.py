"""What all routes share: the memory as its tenants see it, slots, threads and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from inferscale.answer import ReplyStream
from inferscale.config import ServeConfig
from inferscale.memory import Memory
from inferscale.serve.answers import Answer
from inferscale.serve.gate import Gate
from inferscale.serve.keys import ApiKeys
from inferscale.serve.metrics import Metrics

log = logging.getLogger("inferscale.serve")

T = TypeVar("T")

MEMORY_SLOTS = 8
"""Calls to the memories at once: they share the store's lock and the embedding model."""


class Gateway:
    """One memory behind HTTP. Its coroutines belong to one event loop."""

    def __init__(
        self, memory: Memory, config: ServeConfig, keys: ApiKeys, health: Callable[[], str | None] | None = None
    ) -> None:
        """`health` says what is the matter with whatever answers; default: the engine's own."""
        self.model = memory.engine.spec.name
        self.context = memory.engine.spec.max_positions
        self.health = health or memory.engine.health
        self._keys = keys
        self._memory = memory
        self._views: dict[str, Memory] = {}
        self._answers = Gate(config.max_concurrent, config.max_waiting)
        self._memories = Gate(MEMORY_SLOTS, config.max_waiting)
        self._answering = ThreadPoolExecutor(config.max_concurrent, "inferscale-answer")
        self._calling = ThreadPoolExecutor(MEMORY_SLOTS, "inferscale-memory")
        self._remembering = ThreadPoolExecutor(1, "inferscale-remember")
        self.metrics = Metrics(self._answers, self._memories, lambda: self.health() is None)

    def memory_of(self, authorization: str | None) -> Memory:
        """The memory as the tenant of this Authorization header sees it; ApiError 401 if there is none."""
        tenant = self._keys.tenant_of(authorization)
        if tenant not in self._views:
            self._views[tenant] = self._memory.for_tenant(tenant)
        return self._views[tenant]

    async def answer(self, start: Callable[[], ReplyStream]) -> Answer:
        """Begin an answer in a slot of its own."""
        return await Answer.begin(self._answers, self._answering, start)

    async def call(self, work: Callable[..., T], *args: Any, **keywords: Any) -> T:
        """A call to the memories, in a thread."""
        async with self._memories:
            return await asyncio.get_running_loop().run_in_executor(self._calling, partial(work, *args, **keywords))

    def remember(self, memory: Memory, message: dict[str, str], owners: dict[str, str]) -> None:
        """Remember what a user said, after the answer and in its own time; only a kill can lose it."""
        self._remembering.submit(self._remember, memory, message, owners)

    def close(self) -> None:
        """Finish what is to be remembered; nothing new is taken."""
        for pool in (self._answering, self._calling, self._remembering):
            pool.shutdown(wait=True)

    def _remember(self, memory: Memory, message: dict[str, str], owners: dict[str, Any]) -> None:
        try:
            memory.add([message], **owners)
        except Exception as error:
            self.metrics.remembered.labels("failed").inc()
            log.warning("a turn was not remembered: %s", error)
        else:
            self.metrics.remembered.labels("added").inc()
