"""The trivial index: a dictionary and a loop. It documents the contract and is the oracle of the tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from inferscale.core import FactId, ScopeId
from inferscale.index.base import Scored, VectorIndex, Vectors, check_k, unit_rows


class NaiveIndex(VectorIndex):
    """Compares a query with every vector in turn, in float64."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self._rows: dict[ScopeId, dict[FactId, Vectors]] = {}
        self._lock = threading.RLock()

    def put(self, scope: ScopeId, ids: Sequence[FactId], vectors: Vectors) -> None:
        """See `VectorIndex.put`."""
        rows = unit_rows(vectors, len(ids), self.dim)
        with self._lock:
            self._rows.setdefault(scope, {}).update(zip(ids, rows, strict=True))

    def remove(self, scope: ScopeId, ids: Sequence[FactId]) -> int:
        """See `VectorIndex.remove`."""
        with self._lock:
            held = self._rows.get(scope, {})
            return sum(held.pop(fact, None) is not None for fact in ids)

    def drop_scope(self, scope: ScopeId) -> int:
        """See `VectorIndex.drop_scope`."""
        with self._lock:
            return len(self._rows.pop(scope, {}))

    def clear(self) -> None:
        """See `VectorIndex.clear`."""
        with self._lock:
            self._rows.clear()

    def search(self, scopes: Sequence[ScopeId], query: Vectors, k: int) -> list[Scored]:
        """See `VectorIndex.search`."""
        check_k(k)
        unit = unit_rows(np.asarray(query)[None], 1, self.dim)[0]
        with self._lock:
            found = [
                (fact, _cosine(row, unit))
                for scope in dict.fromkeys(scopes)
                for fact, row in self._rows.get(scope, {}).items()
            ]
        return sorted(found, key=lambda hit: (-hit[1], hit[0]))[:k]

    def similar(self, scope: ScopeId, ids: Sequence[FactId], k: int) -> list[list[Scored]]:
        """See `VectorIndex.similar`."""
        check_k(k)
        with self._lock:
            held = self._rows.get(scope, {})
            return [
                [hit for hit in self.search([scope], held[fact], len(held)) if hit[0] != fact][:k]
                if fact in held
                else []
                for fact in ids
            ]

    def count(self, scope: ScopeId) -> int:
        """See `VectorIndex.count`."""
        with self._lock:
            return len(self._rows.get(scope, {}))

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._rows.values()))


def _cosine(a: Vectors, b: Vectors) -> float:
    return float(np.float32((a.astype(np.float64) * b.astype(np.float64)).sum()))
