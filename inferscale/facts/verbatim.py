"""Facts without a model: the sentences of a turn, with their speaker."""

from __future__ import annotations

from collections.abc import Sequence

from inferscale.core import Turn, clean_text, one_line
from inferscale.errors import ConfigError, InvalidInput
from inferscale.facts.base import MAX_FACTS_A_TURN, ExtractedFact, FactExtractor
from inferscale.facts.sentences import pack, sentences, split_long


class VerbatimExtractor(FactExtractor):
    """One turn → up to five facts "Alice: sentence", which together hold every word of it.

    A turn of more sentences has neighbours joined, evenly. A turn that does not fit five facts of
    `max_chars` becomes more than five, and a sentence longer than that is split at whitespace: a fact
    must fit the encoder's context, and a sentence embedder reads little more than 1,000 characters.
    """

    def __init__(self, max_chars: int = 1000) -> None:
        """`max_chars` bounds the spoken part of one fact, in characters."""
        if max_chars < 16:
            raise ConfigError(f"max_chars bounds the characters of a fact and must be 16 or more, got {max_chars}.")
        self.max_chars = max_chars

    def extract(self, turns: Sequence[Turn]) -> list[ExtractedFact]:
        """See `FactExtractor.extract`. Linear in the length of the text."""
        facts: list[ExtractedFact] = []
        for index, turn in enumerate(turns):
            if not isinstance(turn.text, str):
                raise InvalidInput(f"The text of turn {index} must be a string, got {type(turn.text).__name__}.")
            if turn.text.replace("\x00", "").strip():
                speaker = one_line(clean_text(turn.speaker, f"the speaker of turn {index}"))
                spoken = self._pieces(clean_text(turn.text, f"the text of turn {index}"))
                facts += [ExtractedFact(f"{speaker}: {piece}", turn.time, index, speaker) for piece in spoken]
        return facts

    def _pieces(self, text: str) -> list[str]:
        spans = [piece for span in sentences(text) for piece in split_long(text, span, self.max_chars)]
        return [one_line(text[start:end]) for start, end in pack(spans, MAX_FACTS_A_TURN, self.max_chars)]
