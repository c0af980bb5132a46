"""From a query to ranked facts: the contract is `base.Retriever`."""

from __future__ import annotations

from inferscale.index.base import VectorIndex
from inferscale.index.embed import Embedder
from inferscale.retrieve.base import FactLookup, Retriever


def create_retriever(index: VectorIndex, facts: FactLookup, embedder: Embedder) -> Retriever:
    """A retriever over an index, the catalog that owns the facts, and the embedder that filled the index."""
    from inferscale.retrieve.ranked import RankedRetriever

    return RankedRetriever(index, facts, embedder)
