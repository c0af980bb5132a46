"""An answer is made by a thread and read by the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import suppress

from inferscale.answer import Reply, ReplyStream
from inferscale.serve.gate import Gate


class Answer:
    """One answer on its way. `close` it, whatever happened; its slot is free once its thread is done."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[str | Reply | Exception] = asyncio.Queue()
        self._closed = False
        self._first: str | Reply | None = None

    @classmethod
    async def begin(cls, gate: Gate, pool: Executor, start: Callable[[], ReplyStream]) -> Answer:
        """Wait for a slot and the first piece: what goes wrong until then is raised before any byte is sent."""
        await gate.enter()
        answer = cls(gate)
        try:
            pool.submit(answer._work, start)
        except BaseException:
            gate.leave()
            raise
        try:
            answer._first = await answer._next()
        except BaseException:
            answer.close()
            raise
        return answer

    async def pieces(self) -> AsyncIterator[str | Reply]:
        """Pieces of text, and last of all the reply."""
        item = self._first
        while item is not None:
            yield item
            item = None if isinstance(item, Reply) else await self._next()

    def close(self) -> None:
        """Nobody reads on: the thread stops with its next piece. Idempotent."""
        self._closed = True

    async def _next(self) -> str | Reply:
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def _work(self, start: Callable[[], ReplyStream]) -> None:
        try:
            if self._closed:
                return
            with start() as stream:
                for piece in stream:
                    if self._closed:
                        return
                    self._put(piece)
                self._put(stream.reply)
        except Exception as error:
            self._put(error)
        finally:
            self._call(self._gate.leave)

    def _put(self, item: str | Reply | Exception) -> None:
        self._call(self._queue.put_nowait, item)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)
