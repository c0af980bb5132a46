"""Rotation by given tables, half-split layout (the layout of every supported family)."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, D] with cos, sin [n, D] → rotated copy of x (Su et al., arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]
