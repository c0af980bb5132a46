"""Find vectors: the contract is `base.VectorIndex`, the embedders are in `embed`."""

from __future__ import annotations

from inferscale.index.base import VectorIndex


def create_index(dim: int, device: str = "cpu") -> VectorIndex:
    """An empty index for vectors of `dim` numbers that lies on `device` (a torch device name)."""
    from inferscale.index.exact import ExactIndex

    return ExactIndex(dim, device)
