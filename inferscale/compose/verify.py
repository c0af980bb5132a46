"""Never inject what was not verified (invariant 2): fetch a plan's chunks and check all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inferscale.core import ChunkKV, ModelSpec, Plan, RecipeId, token_digest
from inferscale.errors import PlanRejected
from inferscale.store.base import KVStore


def check_prompt(plan: Plan, prompt_ids: Sequence[int], recipes: Collection[RecipeId]) -> None:
    """Raise PlanRejected unless the prompt begins with exactly the plan's tokens, one more follows,
    and the plan's recipe is among the engine's."""
    if plan.recipe not in recipes:
        raise PlanRejected("recipe_mismatch", "The plan was made for another model or recipe; plan the request again.")
    prefix = plan.token_ids
    if len(prompt_ids) <= len(prefix) or tuple(prompt_ids[: len(prefix)]) != prefix:
        raise PlanRejected("prompt_mismatch", "The prompt does not begin with its plan's tokens; plan it again.")
    at = plan.header_tokens
    if at < 1:
        raise PlanRejected("prompt_mismatch", "The plan has no header, and every chunk needs one; plan it again.")
    for chunk in plan.chunks:
        if chunk.start != at or chunk.key.recipe != plan.recipe:
            raise PlanRejected("recipe_mismatch", "The plan's chunks do not follow one another; plan it again.")
        if token_digest(prefix[at : at + chunk.length]) != chunk.key.tokens:
            raise PlanRejected("token_mismatch", "A chunk's tokens are not those of the prompt; plan it again.")
        at += chunk.length
    if at != len(prefix):
        raise PlanRejected("prompt_mismatch", "The plan's chunks do not cover its tokens; plan it again.")


def fetch(plan: Plan, store: KVStore | None, spec: ModelSpec) -> list[ChunkKV]:
    """Every chunk of the plan, verified by the store (checksum) and here (tokens, shape, dtype).

    Raises PlanRejected if a single one is missing or not as planned: then nothing is injected.
    """
    keys = [chunk.key for chunk in plan.chunks]
    found = store.get_many(keys) if store is not None and keys else [None] * len(keys)
    chunks = []
    for planned, kv in zip(plan.chunks, found, strict=True):
        if kv is None:
            raise PlanRejected("missing_chunk", f"The KV of fact {planned.key.fact} is not in the store.")
        if kv.token_ids != plan.token_ids[planned.start : planned.start + planned.length]:
            raise PlanRejected("token_mismatch", f"The KV of fact {planned.key.fact} belongs to other tokens.")
        shape = (spec.layers, planned.length, spec.kv_heads, spec.head_dim)
        if tuple(kv.keys.shape) != shape or str(kv.keys.dtype) != f"torch.{spec.dtype}":
            raise PlanRejected("shape_mismatch", f"The KV of fact {planned.key.fact} is not of this model's shape.")
        chunks.append(kv)
    return chunks
