"""Streaming shows whole characters, and nothing of a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscale.engine.text import TextStream

TEXTS = ["Rex is a collie.", "naïve café — 東京 🐕‍🦺 e\u0301", "مرحبا بالعالم", "🇵🇹🇯🇵👩‍👩‍👧‍👦"]


def stream(tokenizer: Any, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    out = TextStream(tokenizer, stop)
    pieces = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        pieces.append(out.push(token))
        if out.stopped:
            return pieces, True
    return [*pieces, out.flush()], False


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_never_split_a_character(tokenizer: Any, text: str) -> None:
    pieces, _ = stream(tokenizer, text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(alphabet="ab \n", min_size=1, max_size=30),
    stop=st.lists(st.text(alphabet="ab \n", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_exactly_where_they_first_appear(tokenizer: Any, text: str, stop: list[str]) -> None:
    pieces, stopped = stream(tokenizer, text, tuple(stop))
    # Generation ends with the token that completes a stop string. Of those that are complete by then, the one that
    # begins first cuts: a longer one that begins earlier but would need more tokens is never generated.
    expected = text, False
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    for count in range(1, len(tokens) + 1):
        so_far = tokenizer.decode(tokens[:count])
        if found := [so_far.find(s) for s in stop if s in so_far]:
            expected = so_far[: min(found)], True
            break
    assert ("".join(pieces), stopped) == expected


def test_the_first_stop_string_to_be_complete_ends_the_answer(tokenizer: Any) -> None:
    pieces, stopped = stream(tokenizer, "one two one two", (" two one two", "two"))
    assert stopped
    assert "".join(pieces) == "one "
