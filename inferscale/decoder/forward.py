"""Walk a decoder over new tokens behind a KV buffer: prefill, and decoding one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from inferscale.core import ModelSpec
from inferscale.decoder.base import LayerwiseDecoder
from inferscale.decoder.rope import apply_rotation


class KVBuffer:
    """One request's KV in one contiguous piece: rotated keys and values, each [layers, capacity, G, D].

    Rows [0, length) are filled and stand at positions 0, 1, 2, …
    """

    def __init__(self, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (spec.layers, capacity, spec.kv_heads, spec.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    @classmethod
    def for_decoder(cls, decoder: LayerwiseDecoder, capacity: int) -> KVBuffer:
        """An empty buffer for `capacity` tokens of this decoder."""
        return cls(decoder.spec, capacity, decoder.dtype, decoder.device)

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.keys.nbytes + self.values.nbytes


def extend(decoder: LayerwiseDecoder, token_ids: Tensor, buffer: KVBuffer) -> Tensor:
    """Compute token_ids [n] at the positions behind `buffer`, append their KV → hidden [n, d].

    Mutates `buffer`; its capacity must hold n more tokens.
    """
    assert buffer.length + len(token_ids) <= buffer.capacity, "the caller sizes the buffer"
    with decoder.exclusive:
        return _extend(decoder, token_ids, buffer)


def _extend(decoder: LayerwiseDecoder, token_ids: Tensor, buffer: KVBuffer) -> Tensor:
    start, end = buffer.length, buffer.length + len(token_ids)
    positions = torch.arange(end, device=decoder.device)
    mask = decoder.mask(positions[start:], positions)
    cos, sin = decoder.rotation(positions[start:])
    hidden = decoder.embed(token_ids)
    for layer in range(decoder.spec.layers):
        q, k, v = decoder.project(layer, hidden)
        buffer.keys[layer, start:end] = apply_rotation(k, cos, sin)
        buffer.values[layer, start:end] = v
        out = decoder.attend(
            layer, apply_rotation(q, cos, sin), buffer.keys[layer, :end], buffer.values[layer, :end], mask
        )
        hidden = decoder.finish(layer, hidden, out)
    buffer.length = end
    return hidden
