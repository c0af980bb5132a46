"""The packaged demo conversation is whole: every fact and every answer points at a turn that exists."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    (sample,) = json.loads(files("inferscale").joinpath("data/demo_conversation.json").read_text(encoding="utf-8"))
    return dict(sample)


def turns(demo: dict[str, Any]) -> dict[str, str]:
    """dia_id → speaker"""
    sessions = (value for value in demo["conversation"].values() if isinstance(value, list))
    return {turn["dia_id"]: turn["speaker"] for session in sessions for turn in session}


def test_every_session_has_a_date_and_two_speakers(demo: dict[str, Any]) -> None:
    conversation = demo["conversation"]
    assert set(turns(demo).values()) == {conversation["speaker_a"], conversation["speaker_b"]}
    for n in range(1, 7):
        assert conversation[f"session_{n}_date_time"]
        assert all(turn["dia_id"].startswith(f"D{n}:") for turn in conversation[f"session_{n}"])


def test_every_fact_is_one_line_told_by_the_speaker_of_its_turn(demo: dict[str, Any]) -> None:
    speakers = turns(demo)
    told = [
        (text, speaker, turn)
        for session in demo["observation"].values()
        for speaker, facts in session.items()
        for text, turn in facts
    ]
    assert len({text for text, _, _ in told}) == len(told) >= 60
    for text, speaker, turn in told:
        assert speakers[turn] == speaker
        assert "\n" not in text


def test_every_answer_names_turns_that_facts_were_drawn_from(demo: dict[str, Any]) -> None:
    sources = {turn for session in demo["observation"].values() for facts in session.values() for _, turn in facts}
    for question in demo["qa"]:
        assert question["answer"]
        assert set(question["evidence"]) <= sources
    assert sum(len(question["evidence"]) > 1 for question in demo["qa"]) >= 3
