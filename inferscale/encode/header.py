"""Headers: what stands before the memories. A header's KV is exact, so it is computed once and shared."""

from __future__ import annotations

import threading
from collections import OrderedDict
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


class HeaderCache:
    """KV of headers, each computed when it is first asked for. Thread-safe.

    Holds at most `limit` headers in at most `max_bytes` on the decoder's device (the newest is kept
    even if it alone has more); the one that was not used for longest leaves first. The first header
    ever asked for never leaves: an engine asks for its default header before anything else.
    """

    def __init__(self, decoder: LayerwiseDecoder, limit: int = 64, max_bytes: int = 1 << 30) -> None:
        assert limit >= 2, "the pinned header and the newest"
        self._decoder = decoder
        self._limit = limit
        self._max_bytes = max_bytes
        self._pinned: tuple[int, ...] | None = None
        self._kept: OrderedDict[tuple[int, ...], ChunkKV] = OrderedDict()  # least recently used first
        self._making: set[tuple[int, ...]] = set()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """Headers held."""
        return len(self._kept)

    def get(self, token_ids: Sequence[int]) -> ChunkKV:
        """The pre-RoPE KV of `token_ids`, at least one, with nothing before them; the caller must not change it.

        Who asks while another thread computes it waits for that. If it fails, the error is raised
        to the one that computed, and the next one tries again.
        """
        ids = tuple(token_ids)
        with self._changed:
            self._changed.wait_for(lambda: ids not in self._making)
            if (kept := self._kept.get(ids)) is not None:
                self._kept.move_to_end(ids)
                return kept
            self._making.add(ids)
        made = None
        try:
            made = encode_header(self._decoder, ids)
            return made
        finally:
            with self._changed:
                self._making.remove(ids)
                if made is not None:
                    self._keep(made)
                self._changed.notify_all()

    def _keep(self, header: ChunkKV) -> None:
        self._pinned = self._pinned or header.token_ids
        self._kept[header.token_ids] = header
        while len(self._kept) > self._limit or sum(kv.nbytes for kv in self._kept.values()) > self._max_bytes:
            loose = [ids for ids in self._kept if ids not in (self._pinned, header.token_ids)]
            if not loose:
                return
            del self._kept[loose[0]]
