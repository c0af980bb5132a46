"""Keep every fact's KV made and fresh, in the background.

What is to be done is never stored: a fact without a chunk under its present key is waiting, so a
killed process resumes by looking. Publishing a chunk is ordered against deletion (invariants 6, 8):

1. add the sources (companions, window turns) to the catalog's record, refused if one is gone;
2. write the chunk;
3. replace the record. If a source went or changed meanwhile, its deletion may have looked for this
   chunk too early, so the chunk is deleted and the fact waits again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from inferscale.config import EncodeConfig
from inferscale.core import ChunkKey, ChunkKV, Fact, FactId, ScopeId
from inferscale.encode.base import EncodeJob, Encoder, TokenIds
from inferscale.errors import InferScaleError
from inferscale.index.base import VectorIndex
from inferscale.mirror import Mirror
from inferscale.store import Store, text_hash
from inferscale.store.records import FactRef, SourceKind

log = logging.getLogger("inferscale.upkeep")

GROUP = 32
"""Facts of one scope that are encoded together."""
ATTEMPTS = 3
"""Tries before a fact is left as text until it is asked for again."""
NEIGHBOURS = 20
"""Nearest facts of a new fact whose companions may have changed because of it."""
IDLE = 5.0
"""Seconds without work after which upkeep looks whether something else is due."""
FOREGROUND_PATIENCE = 0.5
"""Seconds that the next pass waits while a request is being answered."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What upkeep has done and has left: facts waiting, facts encoded since the start, failures by fact."""

    waiting: int
    encoded: int
    failed: dict[FactId, str]


@dataclass(frozen=True, slots=True)
class _Sources:
    """What a fact's KV is computed from: ids with their kinds, and the companions' texts."""

    kinds: dict[str, SourceKind]
    texts: dict[FactId, str]


class Upkeep:
    """One worker thread. Public methods may be called from any thread."""

    def __init__(
        self,
        store: Store,
        index: VectorIndex,
        mirror: Mirror,
        encoder: Encoder,
        config: EncodeConfig,
        key_of: Callable[[Fact], tuple[ChunkKey, TokenIds]],
        turn_ids: Callable[[str], TokenIds],
    ) -> None:
        self._store = store
        self._index = index
        self._mirror = mirror
        self._encoder = encoder
        self._config = config
        self._key_of = key_of
        self._turn_ids = turn_ids
        self._waiting: dict[ScopeId, OrderedDict[FactId, int]] = {}
        self._running = 0
        self._resuming = True
        self._encoded = 0
        self._failed: dict[FactId, str] = {}
        self._requests = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="inferscale-upkeep", daemon=True)
        self._thread.start()

    # --- called by others ---

    def want(self, facts: Iterable[FactRef]) -> None:
        """Encode these facts soon (again, if they have KV)."""
        with self._changed:
            for scope, fact in facts:
                self._waiting.setdefault(scope, OrderedDict()).setdefault(fact, 0)
            self._changed.notify_all()

    def drop(self, facts: Iterable[FactRef]) -> None:
        """These facts are forgotten: nothing of them waits or is reported any more."""
        with self._changed:
            for scope, fact in facts:
                self._failed.pop(fact, None)
                if waiting := self._waiting.get(scope):
                    waiting.pop(fact, None)
                    if not waiting:
                        del self._waiting[scope]
            self._changed.notify_all()

    def flush(self, timeout: float | None = None, on_progress: Callable[[Progress], None] | None = None) -> Progress:
        """Wait until nothing waits, at most `timeout` seconds; `on_progress` is called as facts finish."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._closed and (self._waiting or self._running or self._resuming):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(0.5 if left is None else min(left, 0.5))
                if on_progress is not None:
                    on_progress(self._progress())
            return self._progress()

    def progress(self) -> Progress:
        """What is done and left now."""
        with self._changed:
            return self._progress()

    @contextmanager
    def foreground(self) -> Iterator[None]:
        """While inside, a request is being answered: the next encoding pass waits for it a little."""
        with self._changed:
            self._requests += 1
        try:
            yield
        finally:
            with self._changed:
                self._requests -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Stop after the present pass; what waits is found again at the next start. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # --- the worker ---

    def _progress(self) -> Progress:
        waiting = sum(map(len, self._waiting.values())) + self._running
        return Progress(waiting, self._encoded, dict(self._failed))

    def _work(self) -> None:
        try:
            self._resume()
        except Exception as error:  # what it would have found is found again when it is recalled
            log.warning("looking for memories without KV failed: %s", error)
        with self._changed:
            self._resuming = False
            self._changed.notify_all()
        while not self._closed:
            taken = self._take()
            if taken is None:
                self._scrub()
            else:
                self._attempt(*taken)

    def _scrub(self) -> None:
        """Finish a deletion whose end a reader in another process held back."""
        try:
            self._store.catalog.scrub()
        except InferScaleError as error:
            log.warning("bytes of a deleted memory may remain in the log until the next try: %s", error)

    def _attempt(self, scope: ScopeId, tries: dict[FactId, int]) -> None:
        """Encode a group; what is not published then waits again, one at a time, or is given up with the reason."""
        left = dict(tries)
        reason = "it changed while it was encoded"
        try:
            self._encode(scope, left)
        except Exception as error:  # the worker must outlive anything one group can do to it
            reason = str(error) if isinstance(error, InferScaleError) else repr(error)
            log.warning("%d memories are not encoded yet and stay text: %s", len(left), reason)
            log.debug("encoding failed", exc_info=True)
        with self._changed:
            self._running = 0
            for fact, tried in left.items():
                if tried + 1 < ATTEMPTS:
                    self._waiting.setdefault(scope, OrderedDict()).setdefault(fact, tried + 1)
                else:
                    self._failed[fact] = reason
            self._changed.notify_all()

    def _resume(self) -> None:
        """Find what a killed process left: KV of forgotten facts, KV computed from them, facts without KV."""
        catalog, chunks = self._store.catalog, self._store.chunks
        broken = catalog.broken_derivations()
        for scope, fact in broken:
            chunks.delete(scope, fact)
        # Chunks first: a chunk is published after its fact, so one whose fact is not seen later is stale.
        present = set(chunks.keys())
        living: set[FactId] = set()
        for owner in catalog.scopes():
            facts = [fact for fact in catalog.list(owner) if fact.scope == owner]
            living.update(fact.id for fact in facts)
            missing = [fact for fact in facts if self._key_of(fact)[0] not in present]
            self.want(FactRef(owner.id, fact.id) for fact in missing)
            if self._closed:
                return
        chunks.discard(key for key in present if key.fact not in living)

    def _take(self) -> tuple[ScopeId, dict[FactId, int]] | None:
        """The next group of one scope with the tries so far; None if there was none for a while, or when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._waiting), IDLE)
            if self._closed or not self._waiting:
                return None
            scope, facts = next(iter(self._waiting.items()))
            fresh = [fact for fact, tried in facts.items() if not tried][:GROUP]
            group = {fact: facts.pop(fact) for fact in fresh or list(facts)[:1]}
            if not facts:
                del self._waiting[scope]
            self._running = len(group)
            return scope, group

    def _encode(self, scope: ScopeId, left: dict[FactId, int]) -> None:
        """Encode and publish facts of one scope; removes from `left` what is published or gone."""
        found = self._store.catalog.get_many(list(left))
        facts = [fact for fact in found if fact is not None and fact.scope.id == scope]
        living = {fact.id for fact in facts}
        for gone in [fact for fact in left if fact not in living]:
            del left[gone]
        if not facts:
            return
        self._mirror.ensure([scope])
        jobs, sources, turns = self._jobs(scope, facts)
        passes = self._encoder.encode(jobs, turns)
        while True:
            self._give_way()
            if self._closed:
                left.clear()  # found again at the next start
                return
            results = next(passes, None)
            if results is None:
                break
            for published in self._publish([(facts[i], kv, sources[i]) for i, kv in results]):
                del left[published]
        self._refresh(scope, [fact.id for fact in facts])

    def _give_way(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._requests, FOREGROUND_PATIENCE)

    def _jobs(self, scope: ScopeId, facts: Sequence[Fact]) -> tuple[list[EncodeJob], list[_Sources], list[TokenIds]]:
        """Jobs with companions and windows, and for each the ids of what it is computed from."""
        catalog = self._store.catalog
        near = self._index.similar(scope, [fact.id for fact in facts], self._config.companions)
        ids = list({other for row in near for other, _ in row})
        known = {fact.id: fact for fact in catalog.get_many(ids) if fact is not None and fact.scope.id == scope}
        turns = catalog.turns(facts[0].scope) if self._config.window else []
        place = {turn.id: i for i, turn in enumerate(turns)}
        earliest = min((place[fact.turn_id] for fact in facts if fact.turn_id in place), default=0)
        jobs, sources = [], []
        for fact, row in zip(facts, near, strict=True):
            companions = [known[other] for other, _ in row if other in known]
            at = place.get(fact.turn_id)
            before = turns[self._first_source(at, earliest) : at] if at is not None else []
            jobs.append(
                EncodeJob(self._key_of(fact)[1], at, tuple(self._key_of(companion)[1] for companion in companions))
            )
            kinds: dict[str, SourceKind] = {str(turn.id): "turn" for turn in before}
            kinds.update({companion.id: "fact" for companion in companions})
            sources.append(_Sources(kinds, {companion.id: companion.text for companion in companions}))
        return jobs, sources, [self._turn_ids(turn.line) for turn in turns]

    def _first_source(self, turn: int, earliest: int) -> int:
        """The oldest turn that left traces in a fact of `turn`: a streamed turn has itself seen earlier ones."""
        since = earliest if self._config.mode == "streaming" else turn
        return max(0, since - self._config.window)

    def _publish(self, results: Sequence[tuple[Fact, ChunkKV, _Sources]]) -> list[FactId]:
        """Make chunks visible whose sources have not changed, and return their facts; see the top of this file."""
        catalog, chunks = self._store.catalog, self._store.chunks
        records = {f.id: (f.id, text_hash(f.text), list(sources.kinds.items())) for f, _, sources in results}
        ready = [r for r in results if catalog.set_derivations(*records[r[0].id], published=False)]
        chunks.put_many((self._key_of(fact)[0], kv) for fact, kv, _ in ready)
        published = []
        for fact, _, sources in ready:
            if catalog.set_derivations(*records[fact.id], published=True) and self._unchanged(sources.texts):
                published.append(fact.id)
            else:
                chunks.delete(fact.scope.id, fact.id)
        with self._changed:
            self._encoded += len(published)
            self._running = max(1, self._running - len(published))
            for fact_id in published:
                self._failed.pop(fact_id, None)
            self._changed.notify_all()
        return published

    def _unchanged(self, texts: dict[FactId, str]) -> bool:
        """True if the companions still say what they said when they were encoded."""
        ids = list(texts)
        return all(f is not None and f.text == texts[f.id] for f in self._store.catalog.get_many(ids))

    def _refresh(self, scope: ScopeId, new: Sequence[FactId]) -> None:
        """Queue older facts whose companions changed much because of the `new` ones."""
        if not self._config.companions:
            return
        near = self._index.similar(scope, new, NEIGHBOURS)
        candidates = list({other for row in near for other, _ in row} - set(new))
        recorded = self._store.catalog.sources(candidates)
        wanted = []
        for fact, row in zip(candidates, self._index.similar(scope, candidates, self._config.companions), strict=True):
            current = {other for other, _ in row}
            kept = len(current & recorded.get(fact, set()))
            if current and kept < self._config.refresh_below * len(current):
                wanted.append(FactRef(scope, fact))
        self.want(wanted)
