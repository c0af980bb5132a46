"""Lay facts out as a plan: integers only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferscale.core import ChunkKey, Plan, PlanChunk, RecipeId, Scope


@dataclass(frozen=True, slots=True)
class PlanFact:
    """A retrieved fact's tokens, and the key of its KV; None if it has none (yet)."""

    token_ids: tuple[int, ...]
    key: ChunkKey | None


def build_plan(
    scope: Scope, recipe: RecipeId, header_ids: Sequence[int], facts: Sequence[PlanFact], hot: int = 0
) -> Plan:
    """Order `facts` (best last) into header, injected chunks and hot suffix.

    The last `hot` facts stay text. So do facts without KV, in their order before the hot ones:
    the engine prefills them, and no fact is lost to a miss.
    """
    injected = [fact for fact in facts[: len(facts) - hot] if fact.key is not None]
    text = [fact for i, fact in enumerate(facts) if fact.key is None or i >= len(facts) - hot]
    token_ids = list(header_ids)
    chunks = []
    for fact in injected:
        assert fact.key is not None
        chunks.append(PlanChunk(fact.key, start=len(token_ids), length=len(fact.token_ids)))
        token_ids += fact.token_ids
    return Plan(
        scope=scope,
        recipe=recipe,
        header_tokens=len(header_ids),
        token_ids=tuple(token_ids),
        chunks=tuple(chunks),
        hot_ids=tuple(token for fact in text for token in fact.token_ids),
    )
