"""From a question to an answer: recall facts, lay out the plan, let the engine inject and decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from inferscale.compose import PlanFact, build_plan
from inferscale.config import Sampling
from inferscale.core import ChunkKey, Fact, Hit, Plan, RecipeId, Scope
from inferscale.engine.base import Engine, GenerationStream, Request
from inferscale.engine.prompt import Message
from inferscale.errors import InvalidInput, PromptTooLong
from inferscale.mirror import Mirror
from inferscale.retrieve.base import Retriever
from inferscale.shapes import item
from inferscale.store import FactRef, Store

MODES = ("inject", "text", "off")

KeyOf = Callable[[Fact], tuple[ChunkKey, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer and how it came about.

    `memories` are the facts that were in the prompt, the best one last, in the shape of `search`.
    `timings` are seconds: embed, search, plan, compose, prefill, first_token (since the call; all of
    the former and what lies between them) and decode. `fallback` says why a plan could not be injected (the answer
    then came from the very same text, prefilled), None if it was. `text_memories` counts memories
    that were prefilled as text: hot ones, and those whose KV is not made yet.
    """

    text: str
    memories: list[dict[str, Any]]
    mode: str
    fallback: str | None
    finish_reason: str
    prompt_tokens: int
    injected_tokens: int
    text_memories: int
    timings: dict[str, float]


class ReplyStream(Iterator[str]):
    """Pieces of an answer as they come; `reply` once it is finished (it reads the rest first)."""

    def __init__(
        self, pieces: GenerationStream, reply: Callable[[], Reply], busy: AbstractContextManager[None]
    ) -> None:
        self._pieces = _within(busy, pieces)
        self._reply = reply

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def reply(self) -> Reply:
        """The whole answer."""
        for _ in self:
            pass
        return self._reply()


def _within(busy: AbstractContextManager[None], pieces: Iterator[str]) -> Iterator[str]:
    with busy:
        yield from pieces


class Answerer:
    """Answers from one store. Thread-safe.

    `want` is told which recalled facts have no KV: they are served as text and get it after the request.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        mirror: Mirror,
        retriever: Retriever,
        recipe: RecipeId,
        key_of: KeyOf,
        want: Callable[[Sequence[FactRef]], None],
        foreground: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._engine = engine
        self._store = store
        self._mirror = mirror
        self._retriever = retriever
        self._recipe = recipe
        self._key_of = key_of
        self._want = want
        self._foreground = foreground

    def stream(
        self,
        conversation: Sequence[Message],
        scope: Scope,
        *,
        mode: str,
        top_k: int,
        hot: int,
        token_budget: int | None,
        sampling: Sampling,
    ) -> ReplyStream:
        """Start an answer; see `Memory.stream`."""
        if mode not in MODES:
            raise InvalidInput(f"mode must be one of {', '.join(MODES)}, got {mode!r}.")
        began = time.perf_counter()
        tail = self._engine.prompt.tail_ids(conversation)
        room = self._room(tail, sampling)
        budget = room if token_budget is None else min(room, token_budget)
        timings = {"embed": 0.0, "search": 0.0}
        hits: list[Hit] = []
        with self._foreground():
            if mode != "off" and top_k > 0:
                hits = self._recall(conversation[-1].content, scope, top_k, budget, timings)
            recalled = time.perf_counter()
            plan = self._plan(scope, hits, hot if mode == "inject" else 0, with_kv=mode == "inject")
            injected = plan if mode == "inject" else None
            request = Request((*plan.prompt_ids, *tail), injected, sampling, self._store.chunks)
            generation = self._engine.stream(request)
            timings["plan"] = time.perf_counter() - recalled
        before = time.perf_counter() - began

        def reply() -> Reply:
            done = generation.result
            return Reply(
                text=done.text.strip(),
                memories=[item(hit.fact, hit.score) for hit in hits],
                mode=mode,
                fallback=done.fallback,
                finish_reason=done.finish_reason,
                prompt_tokens=done.prompt_tokens,
                injected_tokens=done.injected_tokens,
                text_memories=len(hits) - (len(plan.chunks) if done.injected_tokens else 0),
                timings={**timings, **done.timings, "first_token": before + done.timings["first_token"]},
            )

        return ReplyStream(generation, reply, self._foreground())

    def _room(self, tail: Sequence[int], sampling: Sampling) -> int:
        """Tokens left for memories once header, conversation and some answer have theirs."""
        context, header = self._engine.spec.max_positions, len(self._engine.prompt.header_ids)
        room = context - header - len(tail) - 1
        if room < 0:
            raise PromptTooLong(
                f"The conversation takes {len(tail)} tokens and the header {header}; this model's context holds "
                f"{context}. Shorten the conversation."
            )
        return max(0, room - min(sampling.max_tokens - 1, context // 8))

    def _recall(self, query: str, scope: Scope, top_k: int, budget: int, timings: dict[str, float]) -> list[Hit]:
        began = time.perf_counter()
        vector = self._retriever.embed(query)
        embedded = time.perf_counter()
        self._mirror.ensure(self._store.catalog.matching_scopes(scope))
        hits = self._retriever.search(
            vector, scope, top_k, token_budget=budget, count_tokens=lambda fact: len(self._key_of(fact)[1])
        )
        timings |= {"embed": embedded - began, "search": time.perf_counter() - embedded}
        return hits

    def _plan(self, scope: Scope, hits: Sequence[Hit], hot: int, *, with_kv: bool) -> Plan:
        facts, missing = [], []
        for hit in hits:
            key, token_ids = self._key_of(hit.fact)
            there = with_kv and self._store.chunks.contains(key)
            facts.append(PlanFact(token_ids, key if there else None))
            if with_kv and not there:
                missing.append(FactRef(hit.fact.scope.id, hit.fact.id))
        self._want(missing)
        return build_plan(scope, self._recipe, self._engine.prompt.header_ids, facts, min(hot, len(facts)))
