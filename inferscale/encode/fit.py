"""What of a fact's context fits the model: the least useful is left out first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from inferscale.encode.base import TokenIds

S = TypeVar("S", bound=Sequence[int])


def fit_last(parts: Sequence[S], room: int) -> Sequence[S]:
    """The longest tail of `parts` whose tokens together fit `room`."""
    first = len(parts)
    while first > 0 and len(parts[first - 1]) <= room:
        first -= 1
        room -= len(parts[first])
    return parts[first:]


def fit_first(parts: Sequence[S], room: int) -> Sequence[S]:
    """The longest head of `parts` whose tokens together fit `room`."""
    return fit_last(parts[::-1], room)[::-1]


def window_start(turns: Sequence[TokenIds], turn: int | None, window: int, room: int) -> int:
    """Index of the first turn of the window of `window` turns before `turn` that fits `room` tokens."""
    if turn is None:
        return 0
    before = turns[max(0, turn - window) : turn]
    return turn - len(fit_last(before, room))


def clip_turns(turns: Sequence[TokenIds], max_positions: int) -> Sequence[TokenIds]:
    """Turns cut to their last quarter-context of tokens, so that one long message cannot crowd out the rest."""
    limit = max(1, max_positions // 4)
    return [turn[-limit:] for turn in turns]
