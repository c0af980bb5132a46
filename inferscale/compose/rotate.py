"""Gather chunks into one contiguous cache and rotate their keys to their places.

`place_naive` is the reference, one chunk and layer at a time; `place` moves every byte once and
rotates each layer where it lies, with one layer's keys as scratch. Its lower bound is one memory
copy of the same bytes (`benchmarks/inject` prints the ratio).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inferscale.core import ChunkKV
from inferscale.decoder.base import LayerwiseDecoder
from inferscale.decoder.forward import KVBuffer
from inferscale.decoder.rope import apply_rotation


def place_naive(decoder: LayerwiseDecoder, parts: Sequence[ChunkKV], buffer: KVBuffer) -> None:
    """Append `parts` to `buffer` at the next positions. The trivial twin of `place`."""
    for part in parts:
        start, end = buffer.length, buffer.length + len(part)
        cos, sin = decoder.rotation(torch.arange(start, end, device=decoder.device))
        for layer in range(decoder.spec.layers):
            keys = part.keys[layer].to(device=decoder.device, dtype=decoder.dtype)
            buffer.keys[layer, start:end] = apply_rotation(keys, cos, sin)
            buffer.values[layer, start:end] = part.values[layer]
        buffer.length = end


def place(decoder: LayerwiseDecoder, parts: Sequence[ChunkKV], buffer: KVBuffer) -> None:
    """Append `parts` (any number, any lengths) to `buffer` at the next positions; mutates `buffer`."""
    if not parts:
        return
    start, end = buffer.length, buffer.length + sum(map(len, parts))
    _gather([part.keys for part in parts], buffer.keys[:, start:end])
    _gather([part.values for part in parts], buffer.values[:, start:end])
    cos, sin = _tables(decoder, start, end)
    scratch = torch.empty_like(cos)
    for layer in range(decoder.spec.layers):
        rotate_in_place(buffer.keys[layer, start:end], cos, sin, scratch)
    buffer.length = end


def rotate_in_place(keys: Tensor, cos: Tensor, signed_sin: Tensor, scratch: Tensor) -> None:
    """Rotate keys [n, G, D]; tables and scratch have the same shape, the sine's first half negated."""
    half = keys.shape[-1] // 2
    scratch[..., :half] = keys[..., half:]
    scratch[..., half:] = keys[..., :half]
    keys.mul_(cos).addcmul_(scratch, signed_sin)


def _gather(parts: list[Tensor], target: Tensor) -> None:
    if all(part.device == target.device and part.dtype == target.dtype for part in parts):
        torch.cat(parts, dim=1, out=target)
        return
    row = 0
    for part in parts:
        target[:, row : row + part.shape[1]].copy_(part, non_blocking=True)
        row += part.shape[1]


def _tables(decoder: LayerwiseDecoder, start: int, end: int) -> tuple[Tensor, Tensor]:
    """cos and signed sin [n, G, D] of positions [start, end), spelled out per head so that rotation runs flat."""
    cos, sin = decoder.rotation(torch.arange(start, end, device=decoder.device))
    half = cos.shape[-1] // 2
    signed = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)
    shape = (end - start, decoder.spec.kv_heads, decoder.spec.head_dim)
    return cos[:, None].expand(shape).contiguous(), signed[:, None].expand(shape).contiguous()
