"""One generation, whatever engine makes its tokens: tokens become pieces of text, and at the end a `Generation`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator
from contextlib import closing
from typing import Any

from inferscale.core import ModelSpec
from inferscale.engine.base import Generation, Request
from inferscale.engine.text import TextStream
from inferscale.errors import PromptTooLong


class Run(ABC):
    """One generation from request to finished answer."""

    def __init__(self, request: Request, tokenizer: Any, ends: Collection[int]) -> None:
        """`ends` are the tokens that end an answer; they are no part of it."""
        self.request = request
        self.finish_reason = "closed"
        self.fallback: str | None = None
        self.injected = 0
        self.timings = {"compose": 0.0, "prefill": 0.0, "first_token": 0.0, "decode": 0.0}
        self._tokenizer = tokenizer
        self._ends = ends
        self._token_ids: list[int] = []
        self._text = ""

    @abstractmethod
    def tokens(self, began: float) -> Generator[int]:
        """Start the work, then yield token by token; sets `injected`, `fallback` and the timings of the start.

        Exhausted, it has reached its length; closed, it stops the work. `began` is `time.perf_counter()`
        of the request's start.
        """

    def finish(self) -> Generation:
        """What there is until now."""
        return Generation(
            text=self._text,
            token_ids=tuple(self._token_ids),
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.request.prompt_ids),
            injected_tokens=self.injected,
            fallback=self.fallback,
            timings=self.timings,
        )

    def pieces(self) -> Generator[str]:
        """Pieces of text as they are decoded."""
        began = time.perf_counter()
        try:
            with closing(self.tokens(began)) as tokens:
                yield from self._decoded(tokens)
        finally:
            self.timings["decode"] = time.perf_counter() - began - self.timings["first_token"]

    def first_token(self, began: float, composed: float) -> None:
        """Note that the first token is there now; `composed` is when its computation could begin."""
        now = time.perf_counter()
        self.timings |= {"compose": composed - began, "prefill": now - composed, "first_token": now - began}

    def _decoded(self, tokens: Iterator[int]) -> Iterator[str]:
        text = TextStream(self._tokenizer, self.request.sampling.stop)
        for token in tokens:
            if token in self._ends:
                self.finish_reason = "stop"
                break
            self._token_ids.append(token)
            if piece := text.push(token):
                self._text += piece
                yield piece
            if text.stopped:
                self.finish_reason = "stop"
                break
        else:
            self.finish_reason = "length"
        if rest := text.flush():
            self._text += rest
            yield rest


def room_for(request: Request, spec: ModelSpec) -> int:
    """Tokens that may be generated: what is wanted, as far as the context holds it. Raises PromptTooLong if none."""
    room = spec.max_positions - len(request.prompt_ids)
    if room < 1:
        raise PromptTooLong(
            f"The prompt has {len(request.prompt_ids)} tokens; this model's context holds "
            f"{spec.max_positions}, one of them for the answer. Shorten the message or use fewer memories."
        )
    return min(request.sampling.max_tokens, room)
