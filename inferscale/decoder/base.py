"""The contract that encoding, fusing and the embedded engine share: a decoder, layer by layer.

Both papers need the key *before* rotation (InferScale, arXiv 2607.27090; CacheBlend, arXiv
2405.16444 §4.2), so a decoder here never hides it. Tokens are packed: n counts the tokens of all
sequences of a call together, and each sequence's attention is a call of its own.

Shapes: d hidden size, H query heads, G key/value heads, D head dim, n new tokens, m keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from inferscale.core import ModelSpec
from inferscale.decoder.rope import apply_rotation


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys each query sees, made once from positions and used in every layer.

    `bias` [n, m] is added to the scores (0 or -inf); None with `causal` False means that every
    query sees every key, with `causal` True that queries and keys are one sequence in order.
    """

    bias: Tensor | None = None
    causal: bool = False

    @classmethod
    def by_position(cls, q_pos: Tensor, k_pos: Tensor, dtype: torch.dtype) -> Mask:
        """Query i sees exactly the keys j with k_pos[j] ≤ q_pos[i]: by position, never by index."""
        if q_pos.shape == k_pos.shape and len(q_pos) > 1 and torch.equal(q_pos, k_pos):
            if bool((q_pos[1:] > q_pos[:-1]).all()):
                return cls(causal=True)
        elif int(k_pos.max()) <= int(q_pos.min()):
            return cls()
        hidden = k_pos[None, :] > q_pos[:, None]
        bias = torch.zeros(hidden.shape, dtype=dtype, device=q_pos.device)
        return cls(bias=bias.masked_fill_(hidden, float("-inf")))


class LayerwiseDecoder(ABC):
    """One decoder model, walked layer by layer. No call mutates its inputs; none needs gradients.

    `exclusive` is held for a whole forward pass. On a CPU it is a lock: two passes at once would each
    wake a thread for every core, and threads that wait for each other make both slower than one
    after the other (docs/LOG.md). A GPU queues by itself.
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    exclusive: AbstractContextManager[object]

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [n] int64 → hidden [n, d]."""

    @abstractmethod
    def project(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [n, d] → q [n, H, D], k_pre [n, G, D], v [n, G, D]; after q/k norm and bias, before rotation."""

    @abstractmethod
    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [n] int64 → cos, sin, each [n, D] in the model's dtype, attention scaling included."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """q [n, H, D] and k, v [m, G, D], rotated → out [n, H·D]. Every query must see at least one key."""

    @abstractmethod
    def finish(self, layer: int, hidden: Tensor, out: Tensor) -> Tensor:
        """hidden [n, d] and attention out [n, H·D] → hidden [n, d] after output projection, MLP and residuals."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, d] after the last layer → [n, vocab] float32."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, heads, D] → x rotated to `positions` [n] by the model's own tables."""
        return apply_rotation(x, *self.rotation(positions))

    def mask(self, q_pos: Tensor, k_pos: Tensor) -> Mask:
        """The mask for queries at q_pos [n] over keys at k_pos [m]; see `Mask.by_position`."""
        return Mask.by_position(q_pos, k_pos, self.dtype)
