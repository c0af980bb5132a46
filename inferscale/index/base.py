"""The contract of a vector index: which facts of which scopes are nearest to a vector.

An index holds vectors only, no text and no owner: a scope id names a partition, and a search sees the
partitions that it is given and no other (invariant 4). Vectors are compared by cosine; a zero vector has
cosine 0 with everything.

Every order is total. Scores are rounded to float32, a higher score is better, and facts with the same
score are ordered by fact id (ascending, by code point), so an answer depends on what the index holds and
never on the order of the calls that put it there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from inferscale.core import FactId, ScopeId
from inferscale.errors import InvalidInput, StoreMismatch

Vectors: TypeAlias = npt.NDArray[np.floating]
Scored: TypeAlias = tuple[FactId, float]


class VectorIndex(ABC):
    """Vectors by scope and fact id. Every method may be called from any thread; each call is atomic."""

    def __init__(self, dim: int) -> None:
        if dim < 1:
            raise InvalidInput(f"dim counts the numbers of a vector and must be 1 or more, got {dim}.")
        self.dim = dim

    @abstractmethod
    def put(self, scope: ScopeId, ids: Sequence[FactId], vectors: Vectors) -> None:
        """Insert or replace one vector a fact; `vectors` is [len(ids), dim], any length but zero is unit-normalised.

        Of an id that is given twice the last vector stays. Raises InvalidInput for a NaN, an infinity or
        a wrong count, StoreMismatch for a wrong dimension; then nothing of the call is kept.
        """

    @abstractmethod
    def remove(self, scope: ScopeId, ids: Sequence[FactId]) -> int:
        """Forget these facts at once, their numbers too; unknown ids are skipped. Returns how many were there."""

    @abstractmethod
    def drop_scope(self, scope: ScopeId) -> int:
        """Forget every fact of the scope. Returns how many there were."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def search(self, scopes: Sequence[ScopeId], query: Vectors, k: int) -> list[Scored]:
        """The `k` facts of these scopes nearest to `query` [dim], best first; fewer if there are fewer.

        Unknown and empty scopes add nothing; a scope named twice counts once. Mutates nothing.
        """

    @abstractmethod
    def similar(self, scope: ScopeId, ids: Sequence[FactId], k: int) -> list[list[Scored]]:
        """For each id in turn its `k` nearest OTHER facts of the scope, best first.

        An id that the scope does not hold (any more) gets an empty list. Many ids are answered by one
        blocked matrix product, so memory stays bounded. Mutates nothing.
        """

    @abstractmethod
    def count(self, scope: ScopeId) -> int:
        """Facts in this scope."""

    @abstractmethod
    def __len__(self) -> int:
        """Facts in all scopes."""


def unit_rows(vectors: Vectors, count: int, dim: int) -> npt.NDArray[np.float32]:
    """`vectors` checked as [count, dim] and scaled to length 1 (float32); zero rows stay zero."""
    rows = np.asarray(vectors)
    if rows.dtype.kind not in "fiu":
        raise InvalidInput(f"vectors must be numbers, got an array of {rows.dtype}.")
    if rows.ndim != 2 or rows.shape[0] != count:
        raise InvalidInput(f"vectors must have the shape [{count}, {dim}], got {list(rows.shape)}.")
    if rows.shape[1] != dim:
        raise StoreMismatch(
            f"This index holds vectors of {dim} numbers and was given {rows.shape[1]}; "
            "the embedder changed, so embed the store again with the new one or configure the old one."
        )
    wide = rows.astype(np.float64)  # squares of large float32 numbers overflow float32
    if not np.isfinite(wide).all():
        bad = int(np.flatnonzero(~np.isfinite(wide).all(axis=1))[0])
        raise InvalidInput(f"vector {bad} holds NaN or infinity; embed that text again.")
    peak = np.abs(wide).max(axis=1, keepdims=True, initial=0.0)
    wide /= np.where(peak > 0, peak, 1.0)  # the largest entry becomes 1: the norm can neither overflow nor vanish
    norm = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.asarray(wide / np.where(norm > 0, norm, 1.0), dtype=np.float32)


def check_k(k: int) -> None:
    """Raise InvalidInput unless `k` is a count."""
    if k < 0:
        raise InvalidInput(f"k counts facts and must be 0 or more, got {k}.")
