"""How much work is taken at once; what is more waits a while, and what is more than that is told to come back."""

from __future__ import annotations

import asyncio

from inferscale.serve.errors import ApiError


class Gate:
    """Slots for one kind of work. Lives on one event loop."""

    def __init__(self, slots: int, waiting: int) -> None:
        """`slots` work at once, `waiting` more wait in order of arrival."""
        self._slots = asyncio.Semaphore(slots)
        self._limit = waiting
        self.busy = 0
        self.waiting = 0

    async def enter(self) -> None:
        """Take a slot, waiting for it in turn; ApiError 429 at once if too many wait already."""
        if self._slots.locked() and self.waiting >= self._limit:
            raise ApiError(
                429,
                "The server is busy; send the request again in a moment.",
                kind="rate_limit_error",
                code="server_busy",
            )
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.busy += 1

    def leave(self) -> None:
        """Give the slot back."""
        self.busy -= 1
        self._slots.release()

    async def __aenter__(self) -> None:
        await self.enter()

    async def __aexit__(self, *error: object) -> None:
        self.leave()
