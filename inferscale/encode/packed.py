"""One packed forward pass: many short sequences that branch off one shared, already known prefix.

The trunk is the shared prefix (header, then turns). Rows of the batch may extend the trunk (new
turns) or form branches (companions and a fact) that see a part of it and themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferscale.core import ChunkKV
from inferscale.decoder.base import LayerwiseDecoder, Mask
from inferscale.decoder.rope import apply_rotation


@dataclass(frozen=True, slots=True)
class Known:
    """KV that a pass may look at: rotated keys and values [layers, m, G, D] and positions [m]."""

    keys: Tensor
    values: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class Branch:
    """Rows [start, stop) of the batch, which see the trunk's first `trunk` rows and themselves.

    `hidden_trunk` = [a, b): trunk rows that are hidden from it all the same (turns before its window).
    """

    start: int
    stop: int
    trunk: int
    hidden_trunk: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and positions [n] of one pass.

    Rows [0, trunk_rows) extend the trunk; `trunk_bias` [trunk_rows, trunk + trunk_rows] is their
    mask. The branches cover the other rows.
    """

    token_ids: Tensor
    positions: Tensor
    branches: Sequence[Branch]
    trunk_rows: int = 0
    trunk_mask: Mask | None = None


def place(decoder: LayerwiseDecoder, parts: Sequence[ChunkKV], start: int, spare: int = 0) -> Known:
    """Rotate chunks to consecutive positions from `start`; `spare` empty rows follow for new trunk rows."""
    length = sum(len(part) for part in parts)
    spec = decoder.spec
    shape = (spec.layers, length + spare, spec.kv_heads, spec.head_dim)
    keys = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
    values = torch.empty_like(keys)
    positions = torch.arange(start, start + length + spare, device=decoder.device)
    row = 0
    for part in parts:
        end = row + len(part)
        cos, sin = decoder.rotation(positions[row:end])
        for layer in range(spec.layers):
            keys[layer, row:end] = apply_rotation(part.keys[layer].to(decoder.device), cos, sin)
        values[:, row:end] = part.values
        row = end
    return Known(keys, values, positions)


def run(decoder: LayerwiseDecoder, batch: Batch, trunk: Known) -> tuple[Tensor, Tensor]:
    """Compute every row of the batch → pre-RoPE keys and values [layers, n, G, D] of all rows.

    Mutates `trunk`: its last `trunk_rows` rows are filled with the new turns' KV.
    """
    with decoder.exclusive:
        return _run(decoder, batch, trunk)


def _run(decoder: LayerwiseDecoder, batch: Batch, trunk: Known) -> tuple[Tensor, Tensor]:
    spec, n = decoder.spec, len(batch.token_ids)
    keys = torch.empty((spec.layers, n, spec.kv_heads, spec.head_dim), dtype=decoder.dtype, device=decoder.device)
    values = torch.empty_like(keys)
    cos, sin = decoder.rotation(batch.positions)
    masks = [_branch_mask(decoder, batch, branch, trunk) for branch in batch.branches]
    old = len(trunk) - batch.trunk_rows
    hidden = decoder.embed(batch.token_ids)
    for layer in range(spec.layers):
        q, k, v = decoder.project(layer, hidden)
        keys[layer], values[layer] = k, v
        q, k = apply_rotation(q, cos, sin), apply_rotation(k, cos, sin)
        outs = []
        if batch.trunk_rows:
            assert batch.trunk_mask is not None
            rows = slice(0, batch.trunk_rows)
            trunk.keys[layer, old:], trunk.values[layer, old:] = k[rows], v[rows]
            outs.append(decoder.attend(layer, q[rows], trunk.keys[layer], trunk.values[layer], batch.trunk_mask))
        for branch, mask in zip(batch.branches, masks, strict=True):
            seen_k, seen_v = _seen(layer, k, v, branch, trunk)
            outs.append(decoder.attend(layer, q[branch.start : branch.stop], seen_k, seen_v, mask))
        hidden = decoder.finish(layer, hidden, torch.cat(outs))
    return keys, values


def _seen(layer: int, k: Tensor, v: Tensor, branch: Branch, trunk: Known) -> tuple[Tensor, Tensor]:
    """Keys and values that a branch sees in one layer: its part of the trunk, then itself."""
    rows = slice(branch.start, branch.stop)
    seen = slice(0, branch.trunk)
    return torch.cat([trunk.keys[layer, seen], k[rows]]), torch.cat([trunk.values[layer, seen], v[rows]])


def _branch_mask(decoder: LayerwiseDecoder, batch: Batch, branch: Branch, trunk: Known) -> Mask:
    own = batch.positions[branch.start : branch.stop]
    seen = torch.cat([trunk.positions[: branch.trunk], own])
    mask = decoder.mask(own, seen)
    first, last = branch.hidden_trunk
    if first == last:
        return mask
    bias = mask.bias
    if bias is None:  # one row that sees everything
        bias = torch.zeros((len(own), len(seen)), dtype=decoder.dtype, device=decoder.device)
    bias[:, first:last] = float("-inf")
    return Mask(bias=bias)


def cut(token_ids: tuple[int, ...], keys: Tensor, values: Tensor, stop: int) -> ChunkKV:
    """A copy of the rows of `token_ids`, which end at row `stop` of a pass's keys and values [layers, n, G, D]."""
    own = slice(stop - len(token_ids), stop)
    return ChunkKV(tuple(token_ids), keys[:, own].clone(), values[:, own].clone())
