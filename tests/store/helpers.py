"""Small chunks and facts: 2 layers, 1 kv head of size 4, so that a failure is readable."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch

from inferscale.core import ChunkKey, ChunkKV, Fact, FactId, RecipeId, Scope, ScopeId, Turn, TurnId, token_digest
from inferscale.store import Catalog
from inferscale.store.turns import insert_turns, name_turns

LAYERS, KV_HEADS, HEAD_DIM = 2, 1, 4
ALICE, BOB = Scope(user="alice"), Scope(user="bob")
RECIPE = RecipeId("5" * 32)


def key_of(fact: str, token_ids: tuple[int, ...], scope: str = ALICE.id, recipe: str = RECIPE) -> ChunkKey:
    return ChunkKey(ScopeId(scope), FactId(fact), RecipeId(recipe), token_digest(token_ids))


def kv_of(token_ids: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> ChunkKV:
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, len(token_ids), KV_HEADS, HEAD_DIM)
    return ChunkKV(
        token_ids,
        torch.randn(shape, generator=generator).to(dtype),
        torch.randn(shape, generator=generator).to(dtype),
    )


def item(fact: str, n: int = 3, seed: int = 0, scope: str = ALICE.id) -> tuple[ChunkKey, ChunkKV]:
    token_ids = tuple(range(7, 7 + n))
    return key_of(fact, token_ids, scope), kv_of(token_ids, seed)


def same(a: ChunkKV | None, b: ChunkKV | None) -> bool:
    """Bit for bit."""
    if a is None or b is None:
        return a is b
    return a.token_ids == b.token_ids and _bits(a.keys) == _bits(b.keys) and _bits(a.values) == _bits(b.values)


def _bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, raw(tensor)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def fact_of(text: str, scope: Scope = ALICE, turn_id: TurnId | None = None, **fields: object) -> Fact:
    return Fact(FactId(str(uuid4())), text, scope, turn_id=turn_id, **fields)  # type: ignore[arg-type]


def add_turns(catalog: Catalog, scope: Scope, turns: Sequence[Turn]) -> list[Turn]:
    """Turns without facts: the product never writes those, tests of turns do."""
    named = name_turns(turns)
    with catalog._db.write() as db:
        insert_turns(db, scope, named)
    return named


VECTOR = np.arange(4, dtype=np.float32)


def all_bytes(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file())


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process that runs `program` from the repository root."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
