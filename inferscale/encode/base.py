"""The encoder's contract: facts in, pre-RoPE KV out.

A fact is never encoded bare (an attention sink would form at its first token). It stands behind the
header, then its context window of turns, then its companions; only the fact's own KV is kept.
Paper: InferScale, arXiv 2607.27090 (context-window encoding); companions are ours (docs/design/encode.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inferscale.core import ChunkKV

ENCODER_VERSION = 1
"""Raise when the KV made from the same recipe changes (the served form of a fact included)."""

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One fact to encode: its tokens and what stands before it.

    `turn` is the index of the fact's own turn in the conversation given to `encode`; the window is
    the turns just before it. None: no window. `companions` are token ids, the closest first.
    """

    fact: TokenIds
    turn: int | None = None
    companions: tuple[TokenIds, ...] = ()


Encoded = list[tuple[int, ChunkKV]]
"""One forward pass's results: the index of each job and its KV."""


class Encoder(ABC):
    """Makes KV for facts. One instance serves one thread at a time."""

    @abstractmethod
    def encode(self, jobs: Sequence[EncodeJob], turns: Sequence[TokenIds] = ()) -> Iterator[Encoded]:
        """Yield pass by pass the results of every job; a pass is computed when it is asked for.

        `turns` is one conversation, oldest first. A window that would not fit the model's context
        loses its oldest turns, companions the least similar first.
        """
