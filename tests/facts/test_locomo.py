"""The LoCoMo loader reads what was published, odd spellings included, and names the place of a fault."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferscale.errors import InvalidInput
from inferscale.facts.locomo import load_locomo, parse_turn_ids


def turn(speaker: str, dia_id: str, text: str, **more: str) -> dict[str, str]:
    return {"speaker": speaker, "dia_id": dia_id, "text": text, **more}


SAMPLE: dict[str, Any] = {
    "sample_id": "talk-1",
    "conversation": {
        "speaker_a": "Nora",
        "speaker_b": "Emil",
        "session_10_date_time": "9:00 am on 2 June, 2024",
        "session_10": [turn("Emil", "D10:1", "The bakery opened.")],
        "session_2": [
            turn("Nora", "D2:1", "I planted a quince."),
            turn("Emil", "D2:02", "", blip_caption="a small tree"),
        ],
        "session_11_date_time": "a date without turns",
    },
    "observation": {
        "session_10_observation": {"Emil": [["Emil's bakery opened.", "D10:1"]]},
        "session_2_observation": {
            "Nora": [["Nora planted a quince.", ["D2:1", "D2:2"]], ["Nora has a garden.", "D2:1; D2:02"]],
            "Emil": [["Emil saw a tree.", "D"]],
        },
    },
    "qa": [
        {"question": "What did Nora plant?", "answer": "a quince", "category": 4, "evidence": ["D2:1"]},
        {"question": "Which year?", "answer": 2024, "category": 2, "evidence": ["D:10:1", "D2:1, D2:2"]},
        {"question": "What did Emil plant?", "category": 5, "evidence": [], "adversarial_answer": "a quince"},
    ],
}


def written(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_everything_is_read_in_order(tmp_path: Path) -> None:
    (talk,) = load_locomo(written(tmp_path, [SAMPLE]))
    assert (talk.id, talk.speakers) == ("talk-1", ("Nora", "Emil"))
    assert [(t.id, t.time, t.text) for t in talk.turns] == [
        ("D2:1", None, "I planted a quince."),
        ("D2:2", None, "(shares a photo: a small tree)"),
        ("D10:1", "9:00 am on 2 June, 2024", "The bakery opened."),
    ]
    assert [(f.text, f.time, f.turn_id, f.speaker) for f in talk.facts] == [
        ("Nora planted a quince.", None, "D2:2", "Nora"),
        ("Nora has a garden.", None, "D2:2", "Nora"),
        ("Emil saw a tree.", None, None, "Emil"),
        ("Emil's bakery opened.", "9:00 am on 2 June, 2024", "D10:1", "Emil"),
    ]
    assert talk.facts[0].turn_ids == ("D2:1", "D2:2")
    assert [(q.answer, q.category, q.evidence) for q in talk.questions] == [
        ("a quince", 4, ("D2:1",)),
        ("2024", 2, ("D10:1", "D2:1", "D2:2")),
        (None, 5, ()),
    ]


def test_a_single_conversation_needs_no_list_and_parts_may_be_missing(tmp_path: Path) -> None:
    (talk,) = load_locomo(written(tmp_path, {"conversation": {"session_1": [turn("Bo", "D1:1", "Hi")]}}))
    assert (talk.id, talk.speakers, talk.facts, talk.questions) == ("conversation-0", ("Bo",), (), ())


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ("D1:3", ["D1:3"]),
        ("D8:6; D9:17", ["D8:6", "D9:17"]),
        (["D1:1", "D1:1", "D30:05"], ["D1:1", "D30:5"]),
        ("D:11:26", ["D11:26"]),
        ("D1:1 D1:2", ["D1:1", "D1:2"]),
        (["D"], []),
        (None, []),
    ],
)
def test_ids_in_every_published_spelling(value: Any, ids: list[str]) -> None:
    assert list(parse_turn_ids(value)) == ids


def put(*path: Any) -> Callable[[Any], None]:
    *parents, key, value = path

    def change(data: Any) -> None:
        for step in parents:
            data = data[step]
        data[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (put("conversation", 3), r"\$\[0\]\.conversation must be a dict"),
        (put("conversation", "session_2", 1, 7), r"session_2\[1\] must be a dict"),
        (put("conversation", "session_2", 1, {"speaker": "Emil", "text": "hi"}), r"session_2\[1\] has no 'dia_id'"),
        (put("conversation", "session_2", 1, "dia_id", "D2:1"), r"session_2\[1\]\.dia_id must be one id"),
        (put("conversation", "session_2", 1, "dia_id", "x"), r"session_2\[1\]\.dia_id must be one id"),
        (put("conversation", "session_10_date_time", 5), r"session_10_date_time must be a str"),
        (put("observation", "session_2_observation", "Nora", [["one"]]), r"\['Nora'\]\[0\] must be \[fact, turn id\]"),
        (put("observation", "session_2_observation", []), r"session_2_observation must be a dict"),
        (put("qa", 0, "category", "4"), r"qa\[0\]\.category must be a int"),
        (put("qa", 0, "answer", ["a"]), r"qa\[0\]\.answer must be text"),
        (put("qa", 1, "evidence", [3]), r"qa\[1\]\.evidence must be a str"),
        (put("qa", 0, {"category": 1}), r"qa\[0\] has no 'question'"),
    ],
)
def test_a_fault_names_its_place(tmp_path: Path, change: Callable[[Any], None], place: str) -> None:
    data = copy.deepcopy(SAMPLE)
    change(data)
    with pytest.raises(InvalidInput, match=place):
        load_locomo(written(tmp_path, [data]))


def test_files_that_are_none_of_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_locomo(tmp_path / "missing.json")
    path = tmp_path / "x.json"
    for content in (b"{", b"\xff\xfe", b"[" * 100_000, b"3", b"[[]]", b"{}"):
        path.write_bytes(content)
        with pytest.raises(InvalidInput):
            load_locomo(path)
