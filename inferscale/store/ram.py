"""The host tier, and the trivial twin of every other tier: a dictionary with a byte budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from threading import Lock

from inferscale.core import ChunkKey, ChunkKV, FactId, RecipeId, ScopeId
from inferscale.store.base import KVStore, StoreUsage, check_item


class RamStore(KVStore):
    """Chunks in memory; the least recently used leave first once their tensors exceed `budget_bytes`.

    A chunk read from disk keeps its file mapped: its bytes count here, though they are page cache that
    other processes share. A chunk larger than the whole budget is not kept.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._bytes = 0
        self._chunks: OrderedDict[ChunkKey, ChunkKV] = OrderedDict()
        self._facts: dict[ScopeId, dict[FactId, set[ChunkKey]]] = {}
        self._lock = Lock()

    def put_many(self, items: Iterable[tuple[ChunkKey, ChunkKV]]) -> None:
        checked = [(key, check_item(key, kv)) for key, kv in items]
        with self._lock:
            for key, kv in checked:
                self._drop(key)
                self._chunks[key] = kv
                self._bytes += kv.nbytes
                self._facts.setdefault(key.scope, {}).setdefault(key.fact, set()).add(key)
            while self._bytes > self._budget:
                self._drop(next(iter(self._chunks)))

    def get_many(self, keys: Sequence[ChunkKey]) -> list[ChunkKV | None]:
        with self._lock:
            found = [self._chunks.get(key) for key in keys]
            for key, kv in zip(keys, found, strict=True):
                if kv is not None:
                    self._chunks.move_to_end(key)
            return found

    def contains(self, key: ChunkKey) -> bool:
        return key in self._chunks

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)

    def delete(self, scope: ScopeId, fact: FactId) -> None:
        with self._lock:
            for key in tuple(self._facts.get(scope, {}).get(fact, ())):
                self._drop(key)

    def delete_scope(self, scope: ScopeId) -> None:
        with self._lock:
            for keys in tuple(self._facts.get(scope, {}).values()):
                for key in tuple(keys):
                    self._drop(key)

    def clear(self) -> None:
        with self._lock:
            self._chunks.clear()
            self._facts.clear()
            self._bytes = 0

    def keys(self, recipe: RecipeId | None = None) -> Iterator[ChunkKey]:
        with self._lock:
            snapshot = tuple(self._chunks)
        return (key for key in snapshot if recipe is None or key.recipe == recipe)

    def usage(self) -> StoreUsage:
        with self._lock:
            return StoreUsage(len(self._chunks), sum(len(kv) for kv in self._chunks.values()), self._bytes)

    def close(self) -> None:
        self.clear()

    def _drop(self, key: ChunkKey) -> None:
        kv = self._chunks.pop(key, None)
        if kv is None:
            return
        self._bytes -= kv.nbytes
        facts = self._facts[key.scope]
        facts[key.fact].discard(key)
        if not facts[key.fact]:
            del facts[key.fact]
        if not facts:
            del self._facts[key.scope]
