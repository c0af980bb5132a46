"""Two tiers as one: reads fall through and are promoted, writes reach the slow tier first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from threading import Lock

from inferscale.core import ChunkKey, ChunkKV, FactId, RecipeId, ScopeId
from inferscale.store.base import KVStore, StoreUsage

WRITE_BATCH = 64  # chunks written, and held, at a time


class TieredStore(KVStore):
    """A fast tier over a slow, durable one. Compose it with itself for more tiers.

    A deletion empties the slow tier, then counts a new generation and empties the fast one. A get or
    put that began in an older generation does not promote, so it cannot bring a deleted chunk back.
    """

    def __init__(self, fast: KVStore, slow: KVStore) -> None:
        self._fast = fast
        self._slow = slow
        self._generation = 0
        self._lock = Lock()

    @property
    def folder(self) -> Path | None:
        return self._slow.folder

    def put_many(self, items: Iterable[tuple[ChunkKey, ChunkKV]]) -> None:
        iterator = iter(items)
        while batch := list(islice(iterator, WRITE_BATCH)):
            generation = self._generation
            self._slow.put_many(batch)
            with self._lock:
                if generation == self._generation:
                    self._fast.put_many(batch)
                else:  # something was deleted meanwhile, perhaps one of these: the next get reads what is true
                    self._fast.discard(key for key, _ in batch)

    def get_many(self, keys: Sequence[ChunkKey]) -> list[ChunkKV | None]:
        generation = self._generation
        found = self._fast.get_many(keys)
        missing = [i for i, kv in enumerate(found) if kv is None]
        self._slow.touch(key for key, kv in zip(keys, found, strict=True) if kv is not None)
        if not missing:
            return found
        loaded = self._slow.get_many([keys[i] for i in missing])
        for i, kv in zip(missing, loaded, strict=True):
            found[i] = kv
        self._promote([(keys[i], kv) for i, kv in zip(missing, loaded, strict=True) if kv is not None], generation)
        return found

    def _promote(self, items: list[tuple[ChunkKey, ChunkKV]], generation: int) -> None:
        with self._lock:
            if generation == self._generation:
                # What a put placed there meanwhile is newer than what was read.
                self._fast.put_many((key, kv) for key, kv in items if not self._fast.contains(key))

    def contains(self, key: ChunkKey) -> bool:
        return self._fast.contains(key) or self._slow.contains(key)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        self._slow.touch(keys)

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        listed = list(keys)
        try:
            self._slow.discard(listed)
        finally:
            with self._lock:
                self._generation += 1
                self._fast.discard(listed)

    def delete(self, scope: ScopeId, fact: FactId) -> None:
        try:
            self._slow.delete(scope, fact)
        finally:
            self.invalidate(scope, fact)

    def invalidate(self, scope: ScopeId, fact: FactId) -> None:
        """Drop a fact from the fast tier only: another process has replaced or deleted its chunks."""
        with self._lock:
            self._generation += 1
            self._fast.delete(scope, fact)

    def invalidate_all(self) -> None:
        """Empty the fast tier only: what other processes did is not known any more."""
        with self._lock:
            self._generation += 1
            self._fast.clear()

    def delete_scope(self, scope: ScopeId) -> None:
        try:
            self._slow.delete_scope(scope)
        finally:
            with self._lock:
                self._generation += 1
                self._fast.delete_scope(scope)

    def clear(self) -> None:
        try:
            self._slow.clear()
        finally:
            with self._lock:
                self._generation += 1
                self._fast.clear()

    def keys(self, recipe: RecipeId | None = None) -> Iterator[ChunkKey]:
        seen = set(self._slow.keys(recipe))
        yield from seen
        yield from (key for key in self._fast.keys(recipe) if key not in seen)

    def usage(self) -> StoreUsage:
        """Usage of the slow tier, which holds everything the fast one does unless it evicted it."""
        return self._slow.usage()

    def close(self) -> None:
        self._fast.close()
        self._slow.close()
