"""Keep this process's index and RAM tier equal to the catalog, whoever writes to it.

A scope's vectors are loaded when the scope is first used. Before every use one cheap question to
SQLite tells whether another process committed; only then is the change feed read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock

from inferscale.core import FactId, ScopeId
from inferscale.errors import StoreMismatch
from inferscale.index.base import VectorIndex
from inferscale.store import Catalog, TieredStore
from inferscale.store.records import Change, Reload


class Mirror:
    """Thread-safe. Applying a change twice is harmless, so nothing is ordered beyond the feed itself."""

    def __init__(self, catalog: Catalog, index: VectorIndex, chunks: TieredStore, identity: Mapping[str, str]) -> None:
        """`identity`: settings of the catalog that must stay as they are, or this process may not go on."""
        self._catalog = catalog
        self._identity = identity
        self._index = index
        self._chunks = chunks
        self._lock = Lock()
        self._loaded: set[ScopeId] = set()
        self._version = catalog.data_version()
        self._revision = catalog.revision()

    def ensure(self, scopes: Sequence[ScopeId]) -> None:
        """Bring these scopes' vectors up to date with every commit made before this call."""
        with self._lock:
            self._follow()
            for scope in scopes:
                if scope not in self._loaded:
                    ids, vectors = self._catalog.embeddings(scope)
                    if ids:
                        self._index.put(scope, ids, vectors)
                    self._loaded.add(scope)

    def _follow(self) -> None:
        version = self._catalog.data_version()
        if version == self._version:
            return
        revision, changes = self._catalog.changes_since(self._revision)
        if isinstance(changes, Reload):
            self._index.clear()
            self._loaded.clear()
            self._chunks.invalidate_all()
            if any(self._catalog.meta_get(key) != value for key, value in self._identity.items()):
                raise StoreMismatch(
                    "Another process adopted this store for another model or embedder; open it again with that one."
                )
        else:
            self._apply(changes)
        self._version, self._revision = version, revision

    def _apply(self, changes: Sequence[Change]) -> None:
        latest: dict[ScopeId, dict[FactId, str]] = {}
        for change in changes:
            latest.setdefault(change.scope, {})[change.fact] = change.op
        for scope, facts in latest.items():
            for fact, op in facts.items():
                if op == "delete":
                    self._chunks.delete(scope, fact)
                else:
                    self._chunks.invalidate(scope, fact)
            if scope in self._loaded:
                self._index.remove(scope, [fact for fact, op in facts.items() if op == "delete"])
                ids, vectors = self._catalog.embeddings(scope, [fact for fact, op in facts.items() if op == "put"])
                if ids:
                    self._index.put(scope, ids, vectors)

    def put(self, scope: ScopeId, ids: Sequence[FactId]) -> None:
        """This process has just committed these facts: read their vectors back, if the scope is loaded."""
        with self._lock:
            if scope in self._loaded and ids:
                found, vectors = self._catalog.embeddings(scope, ids)
                if found:
                    self._index.put(scope, found, vectors)

    def remove(self, scope: ScopeId, ids: Sequence[FactId]) -> None:
        """This process has just deleted these facts."""
        with self._lock:
            self._index.remove(scope, ids)

    def forget(self, scopes: Sequence[ScopeId]) -> None:
        """This process has just deleted these scopes."""
        with self._lock:
            for scope in scopes:
                self._index.drop_scope(scope)
                self._loaded.discard(scope)
