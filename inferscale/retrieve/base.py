"""The contract of retrieval: a query and its scope in, ranked facts out.

Embedding and searching are separate calls, so that a caller can time them apart and embed a query once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from inferscale.core import Fact, FactId, Hit, Scope, ScopeId

CountTokens: TypeAlias = Callable[[Fact], int]
"""Tokens that this fact takes in a prompt."""


class FactLookup(Protocol):
    """What retrieval needs of the catalog, where the text and the owner of every fact are the truth."""

    def matching_scopes(self, scope: Scope, /) -> Sequence[ScopeId]:
        """Ids of the scopes that `scope` covers."""

    def get_many(self, fact_ids: Sequence[FactId], /) -> Sequence[Fact | None]:
        """The facts that exist, in any order; an unknown id is left out or None."""


class Retriever(ABC):
    """Finds the facts for a query. Every method may be called from any thread and mutates nothing."""

    @abstractmethod
    def embed(self, query: str) -> npt.NDArray[np.float32]:
        """The query as a vector [dim]. Raises InvalidInput for a blank text, EmbeddingError for a failure."""

    @abstractmethod
    def search(
        self,
        vector: npt.NDArray[np.float32],
        scope: Scope,
        top_k: int,
        *,
        token_budget: int | None = None,
        count_tokens: CountTokens | None = None,
    ) -> list[Hit]:
        """The best `top_k` facts that `scope` covers, the best one LAST; fewer if fewer exist or fit.

        Of facts with the same text and time only the best ranked is kept. With a budget (in tokens, which needs
        `count_tokens`) the best facts are kept: the list ends at the first one that does not fit. A
        fact larger than the whole budget could never be served, so it is passed over.
        """
