"""The vectors of one scope: contiguous rows that grow by doubling; a deleted row takes the last one's place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inferscale.core import FactId
from inferscale.index.scan import quantise

SMALLEST = 8
"""Rows of a new segment; most scopes of a large deployment hold few facts."""


class Segment:
    """`ids[i]` owns row i of the float32 rows [capacity, dim] and, if `coded`, of their int8 codes.

    Not thread-safe: the index holds its lock. Views handed out are valid until the next mutation.
    """

    def __init__(self, dim: int, device: torch.device, coded: bool) -> None:
        self.ids: list[FactId] = []
        self.slots: dict[FactId, int] = {}
        self.coded = coded
        self._rows = torch.zeros(SMALLEST, dim, device=device)
        self._codes = torch.zeros(SMALLEST if coded else 0, dim, dtype=torch.int8, device=device)
        self._scales = torch.zeros(SMALLEST if coded else 0, device=device)
        self._lost = torch.zeros(SMALLEST if coded else 0, device=device)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rows(self) -> Tensor:
        """The vectors [n, dim], float32, a view."""
        return self._rows[: len(self.ids)]

    @property
    def codes(self) -> tuple[Tensor, Tensor, Tensor]:
        """codes [n, dim] int8, scales [n] and lost lengths [n] (see `scan.quantise`), views."""
        n = len(self.ids)
        return self._codes[:n], self._scales[:n], self._lost[:n]

    def put(self, ids: Sequence[FactId], vectors: Tensor) -> None:
        """Insert or replace; `vectors` [len(ids), dim] has unit rows; no id twice."""
        slots = []
        for fact in ids:
            slot = self.slots.setdefault(fact, len(self.ids))
            if slot == len(self.ids):
                self.ids.append(fact)
            slots.append(slot)
        capacity = len(self._rows)
        while capacity < len(self.ids):
            capacity *= 2
        self._resize(capacity)
        target = torch.tensor(slots, device=self._rows.device)
        self._rows[target] = vectors
        if self.coded:
            self._codes[target], self._scales[target], self._lost[target] = quantise(vectors)

    def remove(self, ids: Sequence[FactId]) -> int:
        """Take these facts out, blank their numbers and return how many were there."""
        removed = 0
        for fact in ids:
            slot = self.slots.pop(fact, None)
            if slot is None:
                continue
            last = len(self.ids) - 1
            moved = self.ids.pop()
            if slot != last:
                self.ids[slot], self.slots[moved] = moved, slot
            for tensor in self._tensors():
                tensor[slot] = tensor[last]
                tensor[last] = 0  # forgetting is complete: no copy stays behind the end
            removed += 1
        if len(self.ids) * 4 <= len(self._rows):  # a quarter, not a half: no resizing back and forth at the border
            self._resize(max(SMALLEST, len(self._rows) // 2))
        return removed

    def _tensors(self) -> list[Tensor]:
        return [self._rows, self._codes, self._scales, self._lost] if self.coded else [self._rows]

    def _resize(self, capacity: int) -> None:
        if capacity == len(self._rows):
            return
        n = min(capacity, len(self._rows))
        grown = []
        for tensor in self._tensors():
            larger = tensor.new_zeros((capacity, *tensor.shape[1:]))
            larger[:n] = tensor[:n]
            grown.append(larger)
        self._rows = grown[0]
        if self.coded:
            self._codes, self._scales, self._lost = grown[1:]
