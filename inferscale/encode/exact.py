"""The paper's way: one forward pass a fact over its whole window. The oracle of `streaming`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from inferscale.core import ChunkKV
from inferscale.decoder.base import LayerwiseDecoder
from inferscale.encode.base import Encoded, EncodeJob, Encoder, TokenIds
from inferscale.encode.fit import clip_turns, fit_first, window_start
from inferscale.encode.packed import Batch, Branch, cut, place, run


class ExactEncoder(Encoder):
    """Computes window + companions + fact behind the shared header, several facts a pass."""

    def __init__(self, decoder: LayerwiseDecoder, header: ChunkKV, *, window: int = 0, batch_tokens: int = 768) -> None:
        self._decoder = decoder
        self._header = header
        self._window = window
        self._batch_tokens = batch_tokens

    def encode(self, jobs: Sequence[EncodeJob], turns: Sequence[TokenIds] = ()) -> Iterator[Encoded]:
        turns = clip_turns(turns, self._decoder.spec.max_positions)
        sequences = [self._sequence(job, turns) for job in jobs]
        # Like lengths share a pass, so that its size is even.
        order = sorted(range(len(jobs)), key=lambda i: len(sequences[i]))
        group: list[int] = []
        used = 0
        for index in order:
            if group and used + len(sequences[index]) > self._batch_tokens:
                yield self._run(jobs, sequences, group)
                group, used = [], 0
            group.append(index)
            used += len(sequences[index])
        if group:
            yield self._run(jobs, sequences, group)

    def _sequence(self, job: EncodeJob, turns: Sequence[TokenIds]) -> list[int]:
        """A job's tokens behind the header."""
        room = self._decoder.spec.max_positions - len(self._header) - len(job.fact)
        companions = fit_first(job.companions, room)
        first = window_start(turns, job.turn, self._window, room - sum(map(len, companions)))
        window = turns[first : job.turn] if job.turn is not None else ()
        return [token for part in (*window, *companions, job.fact) for token in part]

    def _run(self, jobs: Sequence[EncodeJob], sequences: Sequence[list[int]], group: Sequence[int]) -> Encoded:
        device, header = self._decoder.device, len(self._header)
        ids = [token for index in group for token in sequences[index]]
        positions = [header + i for index in group for i in range(len(sequences[index]))]
        branches = []
        start = 0
        for index in group:
            branches.append(Branch(start, start + len(sequences[index]), trunk=header))
            start += len(sequences[index])
        batch = Batch(torch.tensor(ids, device=device), torch.tensor(positions, device=device), branches)
        keys, values = run(self._decoder, batch, place(self._decoder, [self._header], 0))
        ends = [branch.stop for branch in branches]
        return [(i, cut(jobs[i].fact, keys, values, end)) for i, end in zip(group, ends, strict=True)]
