"""Retrieval over an index and a catalog: nearest vectors first, then every rule that text and owner decide."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from inferscale.core import FactId, Hit, Scope, one_line
from inferscale.errors import InvalidInput
from inferscale.index.base import VectorIndex
from inferscale.index.embed import Embedder
from inferscale.retrieve.base import CountTokens, FactLookup, Retriever

SPARE = 8
"""Hits asked for beyond `top_k` at first; duplicates and just-deleted facts are few."""


class RankedRetriever(Retriever):
    """Asks the index for hits, twice as many each time, until `top_k` facts pass or no hit is left."""

    def __init__(self, index: VectorIndex, facts: FactLookup, embedder: Embedder) -> None:
        self._index, self._facts, self._embedder = index, facts, embedder

    def embed(self, query: str) -> npt.NDArray[np.float32]:
        """See `Retriever.embed`."""
        (vector,) = self._embedder.embed([query])
        return np.asarray(vector)

    def search(
        self,
        vector: npt.NDArray[np.float32],
        scope: Scope,
        top_k: int,
        *,
        token_budget: int | None = None,
        count_tokens: CountTokens | None = None,
    ) -> list[Hit]:
        """See `Retriever.search`."""
        if top_k < 0 or (token_budget is not None and token_budget < 0):
            raise InvalidInput("top_k counts facts and token_budget counts tokens; both must be 0 or more.")
        if token_budget is not None and count_tokens is None:
            raise InvalidInput("A token budget needs count_tokens to measure a fact.")
        left = token_budget
        hits: list[Hit] = []
        seen: set[tuple[str, str | None]] = set()
        for hit in self._ranked(vector, scope, top_k):
            if len(hits) == top_k:
                break
            said = (normal_text(hit.fact.text), hit.fact.time)
            if said in seen:
                continue
            if left is not None and token_budget is not None and count_tokens is not None:
                size = count_tokens(hit.fact)
                if size > token_budget:
                    continue
                if size > left:
                    break
                left -= size
            seen.add(said)
            hits.append(hit)
        return [hit for hit in reversed(hits) if scope.covers(hit.fact.scope)]  # the wall, whatever came before

    def _ranked(self, vector: npt.NDArray[np.float32], scope: Scope, top_k: int) -> Iterator[Hit]:
        """Every fact that `scope` covers and the catalog still holds, best first, fetched as it is asked for."""
        if top_k == 0:
            return
        scopes = self._facts.matching_scopes(scope)
        seen: set[FactId] = set()
        want = top_k + SPARE
        while True:
            found = self._index.search(scopes, vector, want)
            fresh = {fact: score for fact, score in found if fact not in seen}
            seen.update(fresh)
            facts = {fact.id: fact for fact in self._facts.get_many(list(fresh)) if fact is not None}
            for fact_id, score in fresh.items():
                fact = facts.get(fact_id)
                if fact is not None and scope.covers(fact.scope):
                    yield Hit(fact, score)
            if len(found) < want:
                return
            want *= 2


def normal_text(text: str) -> str:
    """What makes two facts the same: compatibility characters, case and whitespace do not count."""
    return one_line(unicodedata.normalize("NFKC", text).casefold())
