"""From a conversation to facts: the contract is `base.FactExtractor`."""

from __future__ import annotations

from inferscale.facts.base import ExtractedFact, FactExtractor


def create_extractor(max_chars: int = 1000) -> FactExtractor:
    """The extractor that needs no model; `max_chars` bounds the spoken part of one fact."""
    from inferscale.facts.verbatim import VerbatimExtractor

    return VerbatimExtractor(max_chars)


__all__ = ["ExtractedFact", "FactExtractor", "create_extractor"]
