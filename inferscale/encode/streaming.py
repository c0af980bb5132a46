"""Walk a conversation once: each turn is computed once, whatever the window; facts branch off.

The KV of the last w turns is kept before rotation, so every pass starts again at position 0 and no
position grows with the conversation. A turn's KV was itself made behind its own window, so a fact
sees further back than w turns, indirectly; `exact` cuts at w. `evals/fidelity` compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from inferscale.core import ChunkKV
from inferscale.decoder.base import LayerwiseDecoder, Mask
from inferscale.encode.base import Encoded, EncodeJob, Encoder, TokenIds
from inferscale.encode.exact import ExactEncoder
from inferscale.encode.fit import clip_turns, fit_first, fit_last
from inferscale.encode.packed import Batch, Branch, cut, place, run


@dataclass(frozen=True, slots=True)
class _Block:
    """One pass: turns [first, last) are new, turns [oldest, first) are known, `jobs` branch off at [first, last]."""

    oldest: int
    first: int
    last: int
    jobs: tuple[int, ...]


class StreamingEncoder(Encoder):
    """Equals `ExactEncoder` at window 0; jobs without a window are handed over to it."""

    def __init__(self, decoder: LayerwiseDecoder, header: ChunkKV, *, window: int = 0, batch_tokens: int = 768) -> None:
        self._decoder = decoder
        self._header = header
        self._window = window
        self._batch_tokens = min(batch_tokens, decoder.spec.max_positions // 4)
        self._exact = ExactEncoder(decoder, header, window=window, batch_tokens=batch_tokens)

    def encode(self, jobs: Sequence[EncodeJob], turns: Sequence[TokenIds] = ()) -> Iterator[Encoded]:
        turns = clip_turns(turns, self._decoder.spec.max_positions)
        long = self._decoder.spec.max_positions // 4  # such a fact gets a pass of its own, with what window still fits
        walking = [i for i, job in enumerate(jobs) if self._window and job.turn and len(job.fact) <= long]
        rest = sorted(set(range(len(jobs))) - set(walking))
        for results in self._exact.encode([jobs[i] for i in rest], turns):
            yield [(rest[index], kv) for index, kv in results]
        yield from self._walk(jobs, sorted(walking, key=lambda i: jobs[i].turn or 0), turns)

    def _walk(self, jobs: Sequence[EncodeJob], order: Sequence[int], turns: Sequence[TokenIds]) -> Iterator[Encoded]:
        known: dict[int, ChunkKV] = {}
        for block in self._blocks(jobs, order, turns):
            known = {turn: kv for turn, kv in known.items() if turn >= block.first - self._window}
            batch, starts = self._batch(jobs, block, turns)
            parts = [self._header, *(known[turn] for turn in range(block.oldest, block.first))]
            trunk = place(self._decoder, parts, 0, spare=batch.trunk_rows)
            keys, values = run(self._decoder, batch, trunk)
            for turn in range(block.first, block.last):
                known[turn] = cut(turns[turn], keys, values, starts[turn + 1] - starts[block.first])
            ends = [branch.stop for branch in batch.branches]
            yield [(i, cut(jobs[i].fact, keys, values, end)) for i, end in zip(block.jobs, ends, strict=True)]

    def _blocks(self, jobs: Sequence[EncodeJob], order: Sequence[int], turns: Sequence[TokenIds]) -> Iterator[_Block]:
        """Cut the walk into passes of about `batch_tokens` new tokens; turns in no job's window are skipped."""
        waiting = list(reversed(order))
        begin = at = 0  # the walk knows turns [begin, at)
        while waiting:
            if (needed := (jobs[waiting[-1]].turn or 0) - self._window) > at:
                begin = at = needed
            first, size = at, 0
            taken: list[int] = []
            while waiting and size < self._batch_tokens:
                turn = jobs[waiting[-1]].turn or 0
                if turn - self._window > at:
                    break
                if turn > at:
                    size += len(turns[at])
                    at += 1
                else:
                    taken.append(waiting.pop())
                    size += _branch_tokens(jobs[taken[-1]])
            branch = max((_branch_tokens(jobs[i]) for i in taken), default=0)
            oldest = self._fit(turns, max(begin, first - self._window), first, at, branch)
            yield _Block(oldest, first, at, tuple(taken))

    def _fit(self, turns: Sequence[TokenIds], oldest: int, first: int, last: int, branch: int) -> int:
        """The oldest known turn such that header, window, new turns and the longest branch fit the model."""
        new = sum(map(len, turns[first:last]))
        room = self._decoder.spec.max_positions - len(self._header) - new - branch
        return first - len(fit_last(turns[oldest:first], room))

    def _batch(
        self, jobs: Sequence[EncodeJob], block: _Block, turns: Sequence[TokenIds]
    ) -> tuple[Batch, dict[int, int]]:
        """The pass of a block, and the trunk row (which is the position) where each of its turns starts."""
        starts, row = {}, len(self._header)
        for turn in range(block.oldest, block.last):
            starts[turn] = row
            row += len(turns[turn])
        starts[block.last] = row
        ids = [token for turn in turns[block.first : block.last] for token in turn]
        positions = list(range(starts[block.first], row))
        branches = []
        for index in block.jobs:
            job = jobs[index]
            trunk = starts[job.turn or 0]
            companions = fit_first(job.companions, self._decoder.spec.max_positions - trunk - len(job.fact))
            tokens = [token for part in (*companions, job.fact) for token in part]
            hidden = (len(self._header), starts[max(block.oldest, (job.turn or 0) - self._window)])
            branches.append(Branch(len(ids), len(ids) + len(tokens), trunk, hidden))
            positions += range(trunk, trunk + len(tokens))
            ids += tokens
        device = self._decoder.device
        batch = Batch(
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
            branches,
            trunk_rows=row - starts[block.first],
            trunk_mask=self._trunk_mask(block, starts),
        )
        return batch, starts

    def _trunk_mask(self, block: _Block, starts: dict[int, int]) -> Mask:
        """New turns see the header, the w turns before their own, and their own tokens up to themselves."""
        total, old, device = starts[block.last], starts[block.first], self._decoder.device
        rows = torch.arange(total, device=device)
        hidden = rows[None, :] > rows[old:, None]
        for turn in range(block.first, block.last):
            own = slice(starts[turn] - old, starts[turn + 1] - old)
            hidden[own, len(self._header) : starts[max(block.oldest, turn - self._window)]] = True
        bias = torch.zeros(hidden.shape, dtype=self._decoder.dtype, device=device)
        return Mask(bias=bias.masked_fill_(hidden, float("-inf")))


def _branch_tokens(job: EncodeJob) -> int:
    return len(job.fact) + sum(map(len, job.companions))
