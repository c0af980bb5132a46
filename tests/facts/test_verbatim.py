"""Verbatim facts: every word of a turn, in up to five readable pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale.core import Turn
from inferscale.errors import ConfigError, InvalidInput
from inferscale.facts import create_extractor
from inferscale.facts.sentences import pack, sentences, split_long
from inferscale.facts.verbatim import VerbatimExtractor


def split(text: str) -> list[str]:
    return [text[start:end] for start, end in sentences(text)]


def said(text: str, max_chars: int = 1000) -> list[str]:
    facts = VerbatimExtractor(max_chars).extract([Turn("Al", text)])
    assert all(f.text.startswith("Al: ") for f in facts)
    return [f.text.removeprefix("Al: ") for f in facts]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("I met Dr. Smith at 3.5 km. He ran.", 2),
        ("J. K. Rowling wrote it. So am I. Then we left.", 3),
        ("Born Jan. 5 in the U.S. and e.g. raised there.", 1),
        ("It costs approx. ten euros... maybe twelve.", 1),
        ("Wait... What?! Really?", 3),
        ("See https://a.example/b.c?d=e.f and v2.0.1 of a.py. Thanks!", 2),
        ("1. Milk\n2. Eggs\n10. Bread", 3),
        ("I am 42. She is 7.", 2),
        ('He said "Stop." Then (he left.) Gone.', 3),
        ("Great!\U0001f389 I know! \U0001f602\U0001f602 Bye", 3),
        ("今日は犬を飼った。名前はレックスです！いい?", 3),  # noqa: RUF001
        ("هل أنت هنا؟ نعم۔ حسنا", 3),  # noqa: RUF001
        ("मैं यहाँ हूँ। तुम कहाँ हो?", 2),
        ("no mark at all", 1),
        ("one line\nand another\r\n\r\nand a third", 3),
        ("   ", 0),
        ("...", 1),
    ],
)
def test_sentences_end_where_a_reader_would_end_them(text: str, count: int) -> None:
    assert len(split(text)) == count, split(text)


def test_emoji_stay_with_the_sentence_they_follow() -> None:
    assert split("Great!\U0001f389 I know! \U0001f44d\U0001f3fd Bye") == [
        "Great!\U0001f389",
        "I know! \U0001f44d\U0001f3fd",
        "Bye",
    ]


pieces = st.text(st.sampled_from('aB1 .!?。\n\t")؟…\u0301\u200d\U0001f600-'), max_size=120) | st.text(max_size=80)


@given(pieces, st.integers(16, 60))
def test_no_character_is_lost_and_no_limit_exceeded(text: str, limit: int) -> None:
    cut = [piece for span in sentences(text) for piece in split_long(text, span, limit)]
    for spans in (sentences(text), cut, pack(cut, 5, limit)):
        assert "".join("".join(text[a:b].split()) for a, b in spans) == "".join(text.split())
        assert all(a < b for a, b in spans)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    packed = pack(cut, 5, limit)
    assert all(b - a <= limit for a, b in packed)
    if sum(b - a for a, b in cut) + len(text) - len(text.strip()) < limit:
        assert len(packed) <= 5


@given(st.lists(st.integers(1, 30), min_size=6, max_size=40))
def test_more_than_five_sentences_are_joined_evenly(lengths: list[int]) -> None:
    text = " ".join("a" * (n - 1) + "!" for n in lengths)
    packed = pack(sentences(text), 5, 10_000)
    assert 1 <= len(packed) <= 5
    assert max(b - a for a, b in packed) <= len(text) / 5 + 2 * max(lengths) + 2


def test_up_to_five_sentences_stay_apart() -> None:
    assert said("A b! C d! E f! G h! I j!") == ["A b!", "C d!", "E f!", "G h!", "I j!"]
    assert len(said("A b! C d! E f! G h! I j! K l!")) <= 5


def test_a_turn_too_long_for_five_facts_becomes_more() -> None:
    text = " ".join(f"word{i}" for i in range(1000))
    facts = said(text, 200)
    assert " ".join(facts) == text  # cut at spaces only
    assert all(len(f) <= 200 for f in facts)
    assert len(facts) < 2 * len(text) / 200


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "a. ",
        "!",
        "? ",
        "。",
        "\u0301",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "! \t",
        "!\U0001f389",
        "x\n",
        "Dr. ",
    ],
)
def test_a_huge_turn_is_cut_and_nothing_is_lost(unit: str) -> None:
    text = "x" + unit * (100_000 // len(unit))
    facts = said(text)
    assert all(len(f) <= 1000 for f in facts)
    assert "".join("".join(f.split()) for f in facts) == "".join(text.split())


def test_a_cut_never_starts_with_a_joiner() -> None:
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    for fact in said(family * 30, 16):
        assert fact[0] not in "\u200d\u0301"
        assert fact[-1] != "\u200d"
    assert all(not f.startswith("\u0301") for f in said("x\u0301" * 100, 17))


def test_facts_carry_time_speaker_and_turn() -> None:
    turns = [Turn("Ann", "Hi! I moved to Oslo.", "8 May 2023"), Turn("Bo\n B", " \x00 "), Turn("Bo\n B", "Nice.")]
    facts = create_extractor().extract(turns)
    assert [(f.text, f.time, f.turn_index, f.speaker) for f in facts] == [
        ("Ann: Hi!", "8 May 2023", 0, "Ann"),
        ("Ann: I moved to Oslo.", "8 May 2023", 0, "Ann"),
        ("Bo B: Nice.", None, 2, "Bo B"),
    ]


def test_values_that_cannot_be_used_are_refused() -> None:
    for turn in (Turn("Al", "bad \ud800"), Turn(" ", "hi"), Turn("Al", 3)):  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="turn 0"):
            VerbatimExtractor().extract([turn])
    with pytest.raises(ConfigError):
        VerbatimExtractor(3)
