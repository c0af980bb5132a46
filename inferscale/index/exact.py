"""Exact search by one matrix product a scope: no graph to build, so an insert or a delete counts at once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from inferscale.core import FactId, ScopeId
from inferscale.index.base import Scored, VectorIndex, Vectors, check_k, unit_rows
from inferscale.index.scan import best, scan_codes, scan_rows, use_codes
from inferscale.index.segment import Segment

SMALL = 1024
"""Segments below this many rows are searched together: a query over many small scopes is one product."""
TOGETHER_ROWS = 2048
"""Rows of small segments joined at once, 3 MB at dim 384: the copy stays in the cache."""
SIMILAR_SCORES = 1 << 22
"""Scores [facts, others] held at once by `similar`, 16 MB."""


class ExactIndex(VectorIndex):
    """Every answer equals that of comparing the query with each vector in turn; see `scan` for why."""

    def __init__(self, dim: int, device: str | torch.device = "cpu") -> None:
        super().__init__(dim)
        self.device = torch.device(device)
        self._coded = use_codes(self.device)
        self._segments: dict[ScopeId, Segment] = {}
        self._lock = threading.Lock()

    def put(self, scope: ScopeId, ids: Sequence[FactId], vectors: Vectors) -> None:
        """See `VectorIndex.put`."""
        rows = unit_rows(vectors, len(ids), self.dim)
        if not ids:
            return
        last = {fact: row for row, fact in enumerate(ids)}
        if len(last) < len(ids):
            rows = rows[list(last.values())]
        tensor = torch.from_numpy(rows).to(self.device)
        with self._lock:
            segment = self._segments.get(scope)
            if segment is None:
                segment = self._segments[scope] = Segment(self.dim, self.device, self._coded)
            segment.put(list(last), tensor)

    def remove(self, scope: ScopeId, ids: Sequence[FactId]) -> int:
        """See `VectorIndex.remove`."""
        with self._lock:
            segment = self._segments.get(scope)
            if segment is None:
                return 0
            removed = segment.remove(ids)
            if not segment.ids:
                del self._segments[scope]
            return removed

    def drop_scope(self, scope: ScopeId) -> int:
        """See `VectorIndex.drop_scope`."""
        with self._lock:
            segment = self._segments.pop(scope, None)
            return 0 if segment is None else len(segment)

    def clear(self) -> None:
        """See `VectorIndex.clear`."""
        with self._lock:
            self._segments.clear()

    def search(self, scopes: Sequence[ScopeId], query: Vectors, k: int) -> list[Scored]:
        """See `VectorIndex.search`."""
        check_k(k)
        vector = torch.from_numpy(unit_rows(np.asarray(query)[None], 1, self.dim)).to(self.device)
        if k == 0:
            return []
        with self._lock:
            held = [self._segments[scope] for scope in dict.fromkeys(scopes) if scope in self._segments]
            large = [segment for segment in held if len(segment) >= SMALL]
            found = [hit for segment in large for hit in _search_one(segment, vector, k)]
            for group in _groups(segment for segment in held if len(segment) < SMALL):
                found += _search_together(group, vector, k)
        return _ranked(found, k)

    def similar(self, scope: ScopeId, ids: Sequence[FactId], k: int) -> list[list[Scored]]:
        """See `VectorIndex.similar`. The lock is held a block at a time, so searches pass in between."""
        check_k(k)
        found: list[list[Scored]] = []
        while k and len(found) < len(ids):
            with self._lock:
                segment = self._segments.get(scope)
                if segment is None:
                    break
                block = ids[len(found) :][: max(1, SIMILAR_SCORES // len(segment))]
                found += _similar_block(segment, block, k)
        return found + [[] for _ in range(len(ids) - len(found))]

    def count(self, scope: ScopeId) -> int:
        """See `VectorIndex.count`."""
        with self._lock:
            segment = self._segments.get(scope)
            return 0 if segment is None else len(segment)

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._segments.values()))


def _ranked(found: list[Scored], k: int) -> list[Scored]:
    """The best `k`, by score and then by id."""
    return sorted(found, key=lambda hit: (-hit[1], hit[0]))[:k]


def _search_one(segment: Segment, query: Tensor, k: int) -> list[Scored]:
    scores, bound = scan_codes(*segment.codes, query) if segment.coded else scan_rows(segment.rows, query)
    _, slots, exact = best(segment.rows, query, scores, bound, k)
    ids = segment.ids
    return [(ids[slot], score) for slot, score in zip(slots.tolist(), exact.tolist(), strict=True)]


def _groups(segments: Iterable[Segment]) -> Iterable[list[Segment]]:
    """Segments in groups of about TOGETHER_ROWS rows."""
    group: list[Segment] = []
    rows = 0
    for segment in segments:
        group.append(segment)
        rows += len(segment)
        if rows >= TOGETHER_ROWS:
            yield group
            group, rows = [], 0
    if group:
        yield group


def _search_together(group: list[Segment], query: Tensor, k: int) -> list[Scored]:
    rows = torch.cat([segment.rows for segment in group]) if len(group) > 1 else group[0].rows
    ids = [fact for segment in group for fact in segment.ids] if len(group) > 1 else group[0].ids
    _, slots, exact = best(rows, query, *scan_rows(rows, query), k)
    return [(ids[slot], score) for slot, score in zip(slots.tolist(), exact.tolist(), strict=True)]


def _similar_block(segment: Segment, block: Sequence[FactId], k: int) -> list[list[Scored]]:
    known = [(place, segment.slots[fact]) for place, fact in enumerate(block) if fact in segment.slots]
    found: list[list[Scored]] = [[] for _ in block]
    if not known:
        return found
    own = torch.tensor([slot for _, slot in known], device=segment.rows.device)
    queries = segment.rows[own]
    scores, bound = scan_rows(segment.rows, queries)
    scores[torch.arange(len(known), device=own.device), own] = -torch.inf  # a fact is not its own neighbour
    which, slots, exact = best(segment.rows, queries, scores, bound, k)
    for row, slot, score in zip(which.tolist(), slots.tolist(), exact.tolist(), strict=True):
        found[known[row][0]].append((segment.ids[slot], score))
    return [_ranked(hits, k) for hits in found]
