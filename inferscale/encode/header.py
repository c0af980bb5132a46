"""The header: every prompt's fixed opening. Its KV is exact, so it is computed once and shared."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferscale.core import ChunkKV
from inferscale.decoder.base import LayerwiseDecoder, Mask
from inferscale.encode.packed import Batch, place, run


def encode_header(decoder: LayerwiseDecoder, token_ids: Sequence[int]) -> ChunkKV:
    """The pre-RoPE KV of `token_ids` with nothing before them, exactly as a prefill computes it."""
    ids = torch.tensor(token_ids, dtype=torch.int64, device=decoder.device)
    n = len(ids)
    batch = Batch(ids, torch.arange(n, device=decoder.device), (), trunk_rows=n, trunk_mask=Mask(causal=n > 1))
    keys, values = run(decoder, batch, place(decoder, (), 0, spare=n))
    return ChunkKV(tuple(int(t) for t in token_ids), keys, values)
