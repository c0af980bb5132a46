"""The contract of fact extraction: turns of a conversation in, short retrievable statements out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from inferscale.core import Turn

MAX_FACTS_A_TURN = 5
"""Facts distilled from one turn, unless the turn is too long for so few."""


@dataclass(frozen=True, slots=True)
class ExtractedFact:
    """A fact before it has an id and an owner; it came from `turns[turn_index]`."""

    text: str
    time: str | None
    turn_index: int
    speaker: str


class FactExtractor(ABC):
    """Distils facts from turns. May be called from any thread; mutates nothing."""

    @abstractmethod
    def extract(self, turns: Sequence[Turn]) -> list[ExtractedFact]:
        """The facts of these turns in the order of the turns; a turn without text gives none.

        Raises InvalidInput for a text that is not valid Unicode.
        """
