"""`Memory`: Mem0's verbs and `chat`. Wires the stages; holds no tensor code."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack
from uuid import uuid4

from inferscale.answer import Answerer, Reply, ReplyStream, Wanted
from inferscale.config import MemoryConfig, Sampling, from_dict, home
from inferscale.core import ChunkKey, Fact, FactId, Hit, Scope, Turn, clean_text, render_fact, token_digest
from inferscale.engine.base import Engine
from inferscale.errors import InvalidInput, MemoryNotFound, StoreMismatch
from inferscale.facts import FactExtractor
from inferscale.index import create_index
from inferscale.index.embed import Embedder, SentenceTransformerEmbedder
from inferscale.intake import Intake
from inferscale.mirror import Mirror
from inferscale.models import resolve_model
from inferscale.retrieve import create_retriever
from inferscale.shapes import (
    Messages,
    item,
    matches,
    parse_conversation,
    parse_count,
    parse_filters,
    parse_id,
    parse_metadata,
    parse_scope,
    parse_turns,
)
from inferscale.store import open_store
from inferscale.store.records import FactRef
from inferscale.store.turns import name_turns
from inferscale.upkeep import Progress, Upkeep

DEFAULT_EMBEDDER = "all-minilm-l6-v2"


class ChatOptions(TypedDict, total=False):
    """The options of `Memory.stream`."""

    user_id: str | None
    agent_id: str | None
    run_id: str | None
    mode: str
    top_k: int | None
    hot: int | None
    sampling: Sampling | None


class Memory:
    """Memories of users, agents and runs, answered from by KV injection.

    The verbs are Mem0's: ids as keywords or in `filters`, results as `{"results": [...]}`. Methods
    may be called from any thread, and any number of processes may open the same `path`.
    """

    def __init__(
        self,
        engine: Engine,
        path: str | Path | None = None,
        *,
        embedder: Embedder | None = None,
        extractor: FactExtractor | None = None,
        config: MemoryConfig | Mapping[str, Any] | None = None,
        tenant: str = "default",
        reencode: bool = False,
    ) -> None:
        """Open the store at `path` (default: $INFERSCALE_HOME/memory), making it if there is none.

        `config` may be a nested mapping, `{"encode": {"companions": 3}}`; an unknown key is a ConfigError.
        `reencode` adopts a store that another model, recipe or embedder made: texts stay, embeddings
        and KV are made again. Without it such a store raises StoreMismatch.
        """
        self.engine = engine
        self.config = from_dict(MemoryConfig, config) if isinstance(config, Mapping) else config or MemoryConfig()
        self.path = Path(path) if path is not None else home() / "memory"
        self._tenant = tenant
        self._owns_store = True
        self._embedder = embedder or SentenceTransformerEmbedder(
            resolve_model(DEFAULT_EMBEDDER).path, name=DEFAULT_EMBEDDER
        )
        recipe = engine.recipe(self.config.encode)
        self._recipe = recipe.id
        self._intake = Intake(engine.prompt, engine.spec.max_positions // 4, extractor)
        self._tokens = lru_cache(maxsize=1 << 16)(self._tokenise)
        self._store = open_store(self.path, self.config.store, self._on_corrupt)
        try:
            self._index = create_index(self._embedder.dim, engine.device)
            identity = self._claim(asdict(recipe), reencode)
            self._mirror = Mirror(self._store.catalog, self._index, self._store.chunks, identity)
        except BaseException:
            self._store.close()
            raise
        self._retriever = create_retriever(self._index, self._store.catalog, self._embedder)
        self._upkeep = Upkeep(
            self._store,
            self._index,
            self._mirror,
            engine.encoder(self.config.encode),
            self.config.encode,
            self._key_of,
            engine.prompt.fact_ids,
        )
        self._answerer = Answerer(
            engine,
            self._store,
            self._mirror,
            self._retriever,
            self._recipe,
            self._key_of,
            self._upkeep.want,
            self._upkeep.foreground,
        )

    # --- Mem0's verbs ---

    def add(
        self,
        messages: Messages,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
        infer: bool = True,
    ) -> dict[str, Any]:
        """Remember messages: a text, or `{"role" or "name", "content", "time"}` mappings.

        With `infer` each message is distilled into facts, without it each is kept as one memory. When
        this returns the memories are durable and searchable; their KV is made in the background
        (`flush` waits for it). Returns `{"results": [{"id", "memory", "event"}]}`, where event is ADD,
        or NONE for a memory that is already there.
        """
        scope = self._scope(user_id=user_id, agent_id=agent_id, run_id=run_id)
        turns = name_turns(parse_turns(messages, timestamp))
        details = parse_metadata(metadata)
        drafts = [(turns[at], text) for text, at in self._intake.drafts(turns, infer)]
        ids, events = self._remember(scope, drafts, turns, details)
        shown = zip(ids, drafts, events, strict=True)
        return {"results": [{"id": fact, "memory": text, "event": event} for fact, (_, text), event in shown]}

    def add_facts(self, facts: Sequence[tuple[Turn | None, str]], scope: Scope) -> list[FactId]:
        """Remember facts that are already distilled, each with the turn it came from (or None); for loaders.

        Returns their ids in order; a fact that is already there keeps its id.
        """
        said = list(dict.fromkeys(replace(turn, id=None) for turn, _ in facts if turn is not None))
        turns = dict(zip(said, name_turns(said), strict=True))
        drafts = [
            (turns[replace(turn, id=None)] if turn else None, self._intake.checked(text, turn.time if turn else None))
            for turn, text in facts
        ]
        return self._remember(scope, drafts, list(turns.values()), {})[0]

    def search(
        self,
        query: str,
        *,
        top_k: int | None = None,
        filters: Mapping[str, Any] | None = None,
        threshold: float | None = None,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
    ) -> dict[str, Any]:
        """The memories nearest to `query`, best first, each with its `score` (cosine).

        `filters` holds owner ids and metadata that must be equal; it can only narrow the scope.
        """
        scope, wanted = parse_filters(
            filters, {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}, self._tenant
        )
        limit = self.config.retrieve.top_k if top_k is None else parse_count(top_k, "top_k")
        hits = self._search(self._retriever.embed(query), scope, limit, wanted)
        kept = [hit for hit in reversed(hits) if threshold is None or hit.score >= threshold]
        return {"results": [item(hit.fact, hit.score) for hit in kept]}

    def get(self, memory_id: str) -> dict[str, Any] | None:
        """One memory, or None."""
        fact = self._find(memory_id)
        return None if fact is None else item(fact)

    def get_all(
        self,
        *,
        filters: Mapping[str, Any] | None = None,
        top_k: int | None = None,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
    ) -> dict[str, Any]:
        """Every memory of a scope, oldest first; `top_k` keeps the first ones."""
        scope, wanted = parse_filters(
            filters, {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}, self._tenant
        )
        limit = None if top_k is None else parse_count(top_k, "top_k")
        facts = self._store.catalog.list(scope, None if wanted else limit)
        return {"results": [item(fact) for fact in facts if matches(fact, wanted)][:limit]}

    def update(
        self,
        memory_id: str,
        text: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        data: str | None = None,
    ) -> dict[str, str]:
        """Change a memory's text or metadata (`data` is Mem0's older name for `text`); its owner never changes."""
        text = data if text is None else text
        if text is None and metadata is None:
            raise InvalidInput("Nothing to update; pass text or metadata.")
        fact = self._require(memory_id)
        vector = None
        if text is not None:
            text = self._intake.checked(text, fact.time)
            (vector,) = self._embedder.embed([render_fact(text, fact.time)])
        merged = None if metadata is None else {**fact.metadata, **parse_metadata(metadata)}
        dependents = self._store.catalog.dependents([fact.id]) if text is not None else []
        self._store.catalog.update(fact.id, text, merged, vector, within=self._tenant)
        if text is not None:
            dependents = list({*dependents, *self._store.catalog.dependents([fact.id])})
            self._drop_kv([FactRef(fact.scope.id, fact.id), *dependents])
            self._mirror.put(fact.scope.id, [fact.id])
            self._tokens.cache_clear()  # what is forgotten must not linger in memory
            self._upkeep.want([FactRef(fact.scope.id, fact.id), *dependents])
        return {"message": "Memory updated successfully!"}

    def delete(self, memory_id: str) -> dict[str, str]:
        """Forget one memory: text, embedding, history, KV, its turn, and KV that was computed from it."""
        fact = self._require(memory_id)
        result = self._store.catalog.delete([fact.id], within=self._tenant)
        self._drop_kv([*result.deleted, *result.dependents])
        self._mirror.remove(fact.scope.id, [fact.id])
        self._tokens.cache_clear()
        self._upkeep.drop(result.deleted)
        self._upkeep.want(result.dependents)
        return {"message": "Memory deleted successfully!"}

    def delete_all(
        self, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> dict[str, Any]:
        """Forget everything of a scope; `deleted` counts the memories. Other scopes are untouched."""
        deleted = self._forget(self._scope(user_id=user_id, agent_id=agent_id, run_id=run_id))
        return {"message": "Memories deleted successfully!", "deleted": deleted}

    def history(self, memory_id: str) -> list[dict[str, Any]]:
        """What happened to a memory, oldest first. A deleted memory shows its deletion and no text."""
        entries = self._store.catalog.history(parse_id(memory_id), self._tenant)
        return [entry._asdict() for entry in entries]

    def reset(self) -> None:
        """Forget everything of everyone (of this tenant)."""
        self._forget(self._tenant)

    # --- answering ---

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Reply:
        """Answer the last user message from the scope's memories; takes the options of `stream`."""
        return self.stream(messages, **options).reply

    def stream(
        self,
        messages: Messages,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        mode: str = "inject",
        top_k: int | None = None,
        hot: int | None = None,
        sampling: Sampling | None = None,
    ) -> ReplyStream:
        """Answer piece by piece; `messages` is a question, or a conversation that ends with one.

        System messages at its beginning are the application's own prompt: they stand in the header,
        before the memories. `mode`: "inject" places the memories' KV, "text" prefills the very same
        tokens, "off" sends the conversation as it is, without memories and the instruction to use
        them, and needs no owner. `hot` leaves the best facts as text behind the injected ones.
        Memories that do not fit the model are left out, the least relevant first. Raises
        PromptTooLong if the conversation alone does not fit.
        """
        owners = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        return self._answerer.stream(parse_conversation(messages), self._wanted(owners, mode, top_k, hot, sampling))

    def complete(
        self,
        prompt: str,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        mode: str = "inject",
        top_k: int | None = None,
        hot: int | None = None,
        sampling: Sampling | None = None,
    ) -> ReplyStream:
        """Continue a text piece by piece, as a base model does: no turn is opened or closed behind it.

        The prompt is the default header (the template's opening and the instruction), the memories
        one a line, a blank line, and `prompt`: one document that the model goes on writing, so a
        prompt like "Rex's breed is" gets its next words. Memories are looked up by the last 2,000
        characters. With `mode="off"` the model sees `prompt` alone, behind BOS if its tokenizer
        puts one there. Control tokens that are spelled out in `prompt` stay text. Pieces and the
        reply's text keep their leading and trailing space. Options and errors are those of `stream`.
        """
        owners = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        wanted = self._wanted(owners, mode, top_k, hot, sampling)
        return self._answerer.complete(clean_text(prompt, "prompt"), wanted)

    # --- tenants ---

    def for_tenant(self, tenant: str) -> Memory:
        """The same store, engine and upkeep as another tenant sees them: none of its calls reaches beyond its tenant.

        A view costs nothing and ends with the memory it was made from; closing a view does nothing.
        """
        Scope(tenant=tenant, user="x")  # refuses a malformed name
        view = copy.copy(self)
        view._tenant = tenant
        view._owns_store = False
        return view

    # --- upkeep ---

    def flush(self, timeout: float | None = None, on_progress: Callable[[Progress], None] | None = None) -> Progress:
        """Wait until every memory's KV is made, at most `timeout` seconds; see `Upkeep.flush`."""
        return self._upkeep.flush(timeout, on_progress)

    def close(self) -> None:
        """Stop background work and close the store; the engine stays open. Idempotent."""
        if not self._owns_store:
            return
        self._upkeep.close()
        self._store.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- inside ---

    def _claim(self, recipe: dict[str, Any], reencode: bool) -> dict[str, str]:
        """Take the store for this model and embedder, or refuse it (invariant 9); returns what it says of them."""
        catalog, spec = self._store.catalog, self.engine.spec
        mine = {"recipe": json.dumps(recipe, sort_keys=True), "embedder": self._embedder.fingerprint}
        theirs = {key: catalog.meta_get(key) for key in mine}
        if theirs == mine:
            return mine
        stale = [key for key, value in theirs.items() if value is not None and value != mine[key]]
        if stale and not reencode:
            raise StoreMismatch(
                f"The store at {self.path} was made with {catalog.meta_get('model')} and other settings "
                f"({', '.join(stale)}); run `inferscale encode --reencode --store {self.path} --model {spec.name} "
                f"--dtype {spec.dtype}` to make its KV for this one (its texts stay), or open it with what made it."
            )
        vectors = None
        if "embedder" in stale:
            facts = {fact.id: fact for scope in catalog.scopes() for fact in catalog.list(scope)}
            vectors = list(zip(facts, self._embedder.embed([fact.line for fact in facts.values()]), strict=True))
        catalog.adopt({**mine, "model": f"{spec.name} ({spec.dtype})"}, vectors)
        if "recipe" in stale:
            self._store.chunks.clear()
        return mine

    def _scope(self, **owners: str | None) -> Scope:
        return parse_scope(owners, self._tenant)

    def _wanted(
        self, owners: Mapping[str, str | None], mode: str, top_k: int | None, hot: int | None, sampling: Sampling | None
    ) -> Wanted:
        settings = self.config.retrieve
        return Wanted(
            scope=None if mode == "off" else self._scope(**owners),
            mode=mode,
            top_k=settings.top_k if top_k is None else parse_count(top_k, "top_k"),
            hot=settings.hot if hot is None else parse_count(hot, "hot"),
            token_budget=settings.token_budget,
            sampling=sampling or Sampling(),
        )

    def _tokenise(self, line: str) -> tuple[str, tuple[int, ...]]:
        token_ids = self.engine.prompt.fact_ids(line)
        return token_digest(token_ids), token_ids

    def _key_of(self, fact: Fact) -> tuple[ChunkKey, tuple[int, ...]]:
        """The key of the fact's present KV, and its token ids."""
        tokens, token_ids = self._tokens(fact.line)
        return ChunkKey(fact.scope.id, fact.id, self._recipe, tokens), token_ids

    def _remember(
        self, scope: Scope, drafts: Sequence[tuple[Turn | None, str]], turns: Sequence[Turn], details: dict[str, Any]
    ) -> tuple[list[FactId], list[str]]:
        """Commit what is new; returns ids and events (ADD or NONE) of all drafts.

        A turn is kept only with a new fact of it, or where the recipe's context windows need it.
        """
        self._mirror.ensure([])  # another process may have adopted the store for another embedder
        known = self._store.catalog.find_duplicates(scope, [text for _, text in drafts])
        ids: list[FactId] = []
        events, new = [], []
        for turn, text in drafts:
            time = turn.time if turn else None
            same = known.get((text, time))
            events.append("ADD" if same is None else "NONE")
            if same is None:
                same = known[text, time] = FactId(str(uuid4()))
                new.append(Fact(same, text, scope, time, turn.id if turn else None, details))
            ids.append(same)
        if not new:
            return ids, events
        sources = {turn.id for turn in turns} if self.config.encode.window else {fact.turn_id for fact in new}
        kept = [turn for turn in turns if turn.id in sources]
        said = [(fact, turn.id) for fact, (turn, _) in zip(ids, drafts, strict=True) if turn and turn.id in sources]
        again = [(fact, turn) for fact, turn in said if turn is not None]
        vectors = self._embedder.embed([fact.line for fact in new])
        self._store.catalog.add_facts(list(zip(new, vectors, strict=True)), kept, again)
        self._mirror.put(scope.id, [fact.id for fact in new])
        self._upkeep.want(FactRef(scope.id, fact.id) for fact in new)
        return ids, events

    def _search(self, vector: Any, scope: Scope, top_k: int, wanted: Mapping[str, Any]) -> list[Hit]:
        """`top_k` hits with the wanted metadata, best last; looks further while there is more to look at."""
        self._mirror.ensure(self._store.catalog.matching_scopes(scope))
        reach = top_k
        while True:
            found = self._retriever.search(vector, scope, reach)
            hits = [hit for hit in found if matches(hit.fact, wanted)]
            if len(hits) >= top_k or len(found) < reach:
                return hits[-top_k:] if top_k else []
            reach *= 4

    def _find(self, memory_id: str) -> Fact | None:
        return self._store.catalog.get(parse_id(memory_id), within=self._tenant)

    def _require(self, memory_id: str) -> Fact:
        fact = self._find(memory_id)
        if fact is None:
            raise MemoryNotFound(f"There is no memory {memory_id!r}; get_all lists the ids that exist.")
        return fact

    def _forget(self, scope: Scope | str) -> int:
        """Forget everything that `scope` covers, or a whole tenant; returns how many memories that were."""
        result = self._store.catalog.delete_scope(scope)
        for name in result.scopes:
            self._store.chunks.delete_scope(name)
        self._mirror.forget(result.scopes)
        self._tokens.cache_clear()
        self._upkeep.drop(result.deleted)
        return len(result.deleted)

    def _drop_kv(self, facts: Iterable[FactRef]) -> None:
        for scope, fact in facts:
            self._store.chunks.delete(scope, fact)

    def _on_corrupt(self, key: ChunkKey) -> None:
        """The store found and removed a damaged chunk: make it again."""
        self._upkeep.want([FactRef(key.scope, key.fact)])
