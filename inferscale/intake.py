"""From what a caller says to texts that can be remembered: each fits the model, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence

from inferscale.core import Turn, clean_text, render_fact
from inferscale.engine.prompt import PromptFormat
from inferscale.errors import InvalidInput
from inferscale.facts import FactExtractor, create_extractor

LONGEST_TOKEN = 32
"""Characters that a token rarely exceeds: what is far too long is not tokenised only to be refused."""
FACT_CHARS = 1000
"""Most characters of a fact that is cut from a longer text."""


class Intake:
    """`max_tokens` bounds one memory as it is served, its time included. Thread-safe."""

    def __init__(self, prompt: PromptFormat, max_tokens: int, extractor: FactExtractor | None) -> None:
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._extractor = extractor or create_extractor(max_chars=min(FACT_CHARS, max_tokens))

    def checked(self, text: str, time: str | None) -> str:
        """A fact's text, cleaned. Raises InvalidInput for a blank text, or one that no request could ever hold."""
        text = clean_text(text).strip()
        if not self._fits(text, time):
            raise InvalidInput(
                f"One memory may take {self._max_tokens} tokens with this model, a quarter of its context; "
                f"this text of {len(text)} characters takes more. Split it, or add it with infer=True."
            )
        return text

    def drafts(self, turns: Sequence[Turn], infer: bool) -> list[tuple[str, int]]:
        """Texts to remember and the index of the turn that each came from; `infer` distils turns into facts."""
        if not infer:
            return [(self.checked(turn.text, turn.time), at) for at, turn in enumerate(turns)]
        found = [(fact.text, fact.turn_index) for fact in self._extractor.extract(turns)]
        return [(piece, at) for text, at in found for piece in self._pieces(text, turns[at].time)]

    def _fits(self, text: str, time: str | None) -> bool:
        if len(text) > LONGEST_TOKEN * self._max_tokens:
            return False
        return len(self._prompt.fact_ids(render_fact(text, time))) <= self._max_tokens

    def _pieces(self, text: str, time: str | None) -> list[str]:
        """The text, halved until each piece fits: some scripts take several tokens a character."""
        if self._fits(text, time) or len(text) < 2:
            return [self.checked(text, time)]
        middle = text.rfind(" ", len(text) // 4, len(text) // 2) + 1 or len(text) // 2
        halves = (text[:middle].strip(), text[middle:].strip())
        return [piece for half in halves if half for piece in self._pieces(half, time)]
