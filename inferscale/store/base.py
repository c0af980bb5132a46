"""The contract of every tier that keeps chunks' KV.

KV is derived data: a tier may lose any chunk at any time (budget, damage, another process), and the
caller re-encodes it from its text. What a tier must never do is return wrong bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from inferscale.core import ChunkKey, ChunkKV, FactId, RecipeId, ScopeId, token_digest
from inferscale.errors import InvalidInput

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What a tier holds now."""

    chunks: int
    """Number of chunks."""
    tokens: int
    """Tokens of all chunks together."""
    bytes: int
    """Bytes occupied: tensors in memory, whole files on disk."""

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes a token costs here; 0 for an empty store."""
        return self.bytes / self.tokens if self.tokens else 0.0


class KVStore(ABC):
    """Chunks by `ChunkKey`. Every method may be called from any thread; none blocks on another's I/O.

    Ownership: tensors given to `put_many` and returned by `get_many` are shared, not copied. Nobody
    may write to them. Shapes are those of `ChunkKV`: keys and values [layers, n, kv_heads, head_dim]
    on the CPU in float32, bfloat16 or float16.
    """

    @abstractmethod
    def put_many(self, items: Iterable[tuple[ChunkKey, ChunkKV]]) -> None:
        """Keep chunks, replacing those of the same key; when this returns they are as durable as the tier is.

        A chunk is visible to lookups only once it is complete (invariant 6). A tier with a budget may
        evict at once, even what was just put. Raises InvalidInput if a chunk's token ids are not those
        its key names, StoreFull if there is no space (chunks already acknowledged stay), StoreError if
        the tier cannot be written.
        """

    @abstractmethod
    def get_many(self, keys: Sequence[ChunkKey]) -> list[ChunkKV | None]:
        """For each key, in order, its verified chunk or None. Never raises for missing or damaged chunks."""

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """True if the chunk is here now; its bytes are verified only by `get_many`."""

    @abstractmethod
    def discard(self, keys: Iterable[ChunkKey]) -> None:
        """Remove exactly these chunks; keys that are not here are ignored."""

    @abstractmethod
    def delete(self, scope: ScopeId, fact: FactId) -> None:
        """Remove every recipe's and every token version's chunk of one fact. Idempotent and cheap."""

    @abstractmethod
    def delete_scope(self, scope: ScopeId) -> None:
        """Remove every chunk of one scope. Idempotent."""

    @abstractmethod
    def clear(self) -> None:
        """Remove every chunk."""

    @abstractmethod
    def keys(self, recipe: RecipeId | None = None) -> Iterator[ChunkKey]:
        """Keys of one recipe, or of all, in no particular order; a snapshot that may be out of date at once."""

    @abstractmethod
    def usage(self) -> StoreUsage:
        """Count what is here. On disk this walks the directory, so it is for people, not for requests."""

    @abstractmethod
    def close(self) -> None:
        """Release files and memory. Idempotent; the store is not used afterwards."""

    @property
    def folder(self) -> Path | None:
        """The folder of this store's files, which other processes may read with a `DiskStore`; None if it has none."""
        return None

    def touch(self, keys: Iterable[ChunkKey]) -> None:  # noqa: B027 - a tier without recency has nothing to do
        """Count these chunks as used now, as `get_many` would. A faster tier calls it for its own hits."""


def check_item(key: ChunkKey, kv: ChunkKV) -> ChunkKV:
    """`kv` ready to be kept under `key`: on the CPU, without gradients, contiguous, pinning no larger buffer."""
    if not kv.token_ids or token_digest(kv.token_ids) != key.tokens:
        raise InvalidInput(f"The chunk of fact {key.fact} does not hold the tokens its key names; encode it again.")
    if kv.keys.dtype not in DTYPES or kv.values.dtype != kv.keys.dtype:
        raise InvalidInput(f"KV must be float32, bfloat16 or float16, got {kv.keys.dtype} and {kv.values.dtype}.")
    if kv.keys.numel() == 0:
        raise InvalidInput(f"KV of shape {tuple(kv.keys.shape)} is empty; encode the fact with a loaded model.")
    return ChunkKV(kv.token_ids, _own(kv.keys), _own(kv.values))


def _own(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    # A slice of a packed forward pass would keep the whole pass alive and be counted as a few bytes.
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
