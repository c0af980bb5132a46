"""From a question to an answer: recall facts, lay out the plan, let the engine inject and decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from inferscale.compose import PlanFact, build_plan
from inferscale.config import Sampling
from inferscale.core import ChunkKey, Fact, Hit, Plan, RecipeId, Scope
from inferscale.engine.base import Engine, GenerationStream, Pieces, Request
from inferscale.engine.prompt import Message
from inferscale.errors import InvalidInput, PromptTooLong
from inferscale.mirror import Mirror
from inferscale.retrieve.base import Retriever
from inferscale.shapes import item
from inferscale.store import FactRef, Store

MODES = ("inject", "text", "off")
QUERY_CHARS = 2000
"""Of a text to continue, this many last characters are what memories are looked up by."""

KeyOf = Callable[[Fact], tuple[ChunkKey, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a caller wants of an answer; see `Memory.stream`. `scope` is None in mode "off" and only there."""

    scope: Scope | None
    mode: str
    top_k: int
    hot: int
    token_budget: int | None
    sampling: Sampling

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidInput(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}.")


@dataclass(frozen=True, slots=True)
class _Layout:
    """A prompt without its memories: they go between header and tail, and are looked up by `query`."""

    header: tuple[int, ...]
    tail: tuple[int, ...]
    query: str


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
    completion_tokens: int
    injected_tokens: int
    text_memories: int
    timings: dict[str, float]


class ReplyStream(Pieces):
    """Pieces of an answer as they come; `reply` once it is finished (it reads the rest first).

    `close` abandons the answer: the engine stops, and background work no longer gives way to it.
    Leaving a `with` closes too. `reply` is then what there was until the end.
    """

    def __init__(
        self, pieces: GenerationStream, reply: Callable[[], Reply], busy: AbstractContextManager[None]
    ) -> None:
        super().__init__(_within(busy, pieces))
        self._generation = pieces
        self._reply = reply

    def close(self) -> None:
        super().close()
        self._generation.close()  # of an answer that was never started, too

    @property
    def reply(self) -> Reply:
        """The whole answer."""
        for _ in self:
            pass
        return self._reply()


def _within(busy: AbstractContextManager[None], pieces: GenerationStream) -> Generator[str]:
    with busy, pieces:
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

    def stream(self, conversation: Sequence[Message], wanted: Wanted) -> ReplyStream:
        """Start an answer; see `Memory.stream`."""
        began = time.perf_counter()
        if wanted.scope is None:
            layout = _Layout((), self._engine.prompt.plain_ids(conversation), "")
        else:
            layout = _Layout(*self._engine.prompt.layout(conversation), conversation[-1].content)
        return self._start(layout, wanted, began, str.strip)

    def complete(self, prompt: str, wanted: Wanted) -> ReplyStream:
        """Start to continue a text; see `Memory.complete`."""
        began = time.perf_counter()
        if wanted.scope is None:
            layout = _Layout((), self._engine.prompt.raw_ids(prompt), "")
        else:
            layout = _Layout(*self._engine.prompt.completion(prompt), prompt[-QUERY_CHARS:])
        return self._start(layout, wanted, began, str)

    def _start(self, layout: _Layout, wanted: Wanted, began: float, shown: Callable[[str], str]) -> ReplyStream:
        """Recall, plan and hand over to the engine; `shown` makes the reply's text of what was generated."""
        timings = {"embed": 0.0, "search": 0.0}
        room = self._room(layout, wanted.sampling)
        with self._foreground():
            hits = self._recall(layout.query, wanted, room, timings)
            recalled = time.perf_counter()
            plan = None if wanted.scope is None else self._plan(wanted.scope, layout.header, hits, wanted)
            before_tail = () if plan is None else plan.prompt_ids
            injected = plan if wanted.mode == "inject" else None
            request = Request((*before_tail, *layout.tail), injected, wanted.sampling, self._store.chunks)
            generation = self._engine.stream(request)
            timings["plan"] = time.perf_counter() - recalled
        before = time.perf_counter() - began

        def reply() -> Reply:
            done = generation.result
            injected_facts = len(plan.chunks) if plan is not None and done.injected_tokens else 0
            return Reply(
                text=shown(done.text),
                memories=[item(hit.fact, hit.score) for hit in hits],
                mode=wanted.mode,
                fallback=done.fallback,
                finish_reason=done.finish_reason,
                prompt_tokens=done.prompt_tokens,
                completion_tokens=len(done.token_ids),
                injected_tokens=done.injected_tokens,
                text_memories=len(hits) - injected_facts,
                timings={**timings, **done.timings, "first_token": before + done.timings["first_token"]},
            )

        return ReplyStream(generation, reply, self._foreground())

    def _room(self, layout: _Layout, sampling: Sampling) -> int:
        """Tokens left for memories once header, conversation and some answer have theirs."""
        context, taken = self._engine.spec.max_positions, len(layout.header) + len(layout.tail)
        room = context - taken - 1
        if room < 0:
            header = f", {len(layout.header)} of them in the header (system prompt included)" if layout.header else ""
            raise PromptTooLong(
                f"The prompt takes {taken} tokens without any memory{header}; this model's context holds {context}, "
                "one of them for the answer. Shorten the conversation or its system prompt."
            )
        return max(0, room - min(sampling.max_tokens - 1, context // 8))

    def _recall(self, query: str, wanted: Wanted, room: int, timings: dict[str, float]) -> list[Hit]:
        if wanted.scope is None or not wanted.top_k:
            return []
        budget = room if wanted.token_budget is None else min(room, wanted.token_budget)
        began = time.perf_counter()
        vector = self._retriever.embed(query)
        embedded = time.perf_counter()
        self._mirror.ensure(self._store.catalog.matching_scopes(wanted.scope))
        hits = self._retriever.search(
            vector,
            wanted.scope,
            wanted.top_k,
            token_budget=budget,
            count_tokens=lambda fact: len(self._key_of(fact)[1]),
        )
        timings |= {"embed": embedded - began, "search": time.perf_counter() - embedded}
        return hits

    def _plan(self, scope: Scope, header: Sequence[int], hits: Sequence[Hit], wanted: Wanted) -> Plan:
        inject = wanted.mode == "inject"
        facts, missing = [], []
        for hit in hits:
            key, token_ids = self._key_of(hit.fact)
            there = inject and self._store.chunks.contains(key)
            facts.append(PlanFact(token_ids, key if there else None))
            if inject and not there:
                missing.append(FactRef(hit.fact.scope.id, hit.fact.id))
        self._want(missing)
        return build_plan(scope, self._recipe, header, facts, min(wanted.hot, len(facts)) if inject else 0)
