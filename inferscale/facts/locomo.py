"""Read conversations in the JSON shape of LoCoMo (https://github.com/snap-research/locomo, arXiv 2402.17753).

The published files are not uniform: ids come as "D1:3", "D8:6; D9:17", "D1:3, D1:5", "D30:05", "D:11:26",
"D" or a list; some sessions have a date and no turns; answers may be numbers or missing. All of that is
read; anything else raises InvalidInput that names the place in the JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferscale.core import Turn, TurnId
from inferscale.errors import InvalidInput

_TURN_ID = re.compile(r"D:?\s*(\d+)\s*:\s*(\d+)")
_SESSION = re.compile(r"session_(\d+)")
_OBSERVATION = re.compile(r"session_(\d+)_observation")


@dataclass(frozen=True, slots=True)
class LocomoFact:
    """One `observation`; `time` is its session's date, `turn_ids` the turns it was distilled from."""

    text: str
    time: str | None
    turn_ids: tuple[TurnId, ...]
    speaker: str

    @property
    def turn_id(self) -> TurnId | None:
        """The last of its turns: only then everything that the fact says had been said."""
        return self.turn_ids[-1] if self.turn_ids else None


@dataclass(frozen=True, slots=True)
class LocomoQuestion:
    """`category`: 1 multi-hop, 2 temporal, 3 open-domain, 4 single-hop, 5 adversarial (often without `answer`)."""

    question: str
    answer: str | None
    category: int
    evidence: tuple[TurnId, ...]


@dataclass(frozen=True, slots=True)
class LocomoConversation:
    """One conversation: its turns in order, the given facts and the questions about it."""

    id: str
    speakers: tuple[str, ...]
    turns: tuple[Turn, ...]
    facts: tuple[LocomoFact, ...]
    questions: tuple[LocomoQuestion, ...]


def load_locomo(path: str | Path) -> list[LocomoConversation]:
    """The conversations of a JSON file: a list of them, or a single one.

    Raises InvalidInput if the file cannot be read, is no JSON or has another shape.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise InvalidInput(f"{path} is no JSON file in UTF-8: {error}.") from error
    samples = _need(data if isinstance(data, list) else [data], list, "$")
    return [_conversation(sample, f"$[{i}]", f"conversation-{i}") for i, sample in enumerate(samples)]


def parse_turn_ids(value: Any, where: str = "$") -> tuple[TurnId, ...]:
    """Every turn id in a string or a list of strings, as "D<session>:<turn>", each once; none is no error."""
    parts = value if isinstance(value, list) else [value]
    texts = [_need(part, str, where) for part in parts if part is not None]
    found = [TurnId(f"D{int(s)}:{int(t)}") for text in texts for s, t in _TURN_ID.findall(text)]
    return tuple(dict.fromkeys(found))


def _conversation(sample: Any, where: str, fallback_id: str) -> LocomoConversation:
    _need(sample, dict, where)
    talk = _get(sample, "conversation", dict, where)
    turns = tuple(_turns(talk, f"{where}.conversation"))
    named = [talk[key] for key in ("speaker_a", "speaker_b") if isinstance(talk.get(key), str)]
    return LocomoConversation(
        id=str(sample.get("sample_id", fallback_id)),
        speakers=tuple(dict.fromkeys([*named, *(turn.speaker for turn in turns)])),
        turns=turns,
        facts=tuple(_facts(sample, talk, where)),
        questions=tuple(_questions(sample, where)),
    )


def _turns(talk: dict[str, Any], where: str) -> Iterator[Turn]:
    seen: set[TurnId] = set()
    for number, key in _numbered(talk, _SESSION):
        for i, item in enumerate(_get(talk, key, list, where)):
            place = f"{where}.{key}[{i}]"
            _need(item, dict, place)
            ids = parse_turn_ids(_get(item, "dia_id", str, place), f"{place}.dia_id")
            if len(ids) != 1 or ids[0] in seen:
                raise InvalidInput(f"{place}.dia_id must be one id like D1:3 that no other turn has.")
            seen.add(ids[0])
            text, caption = _get(item, "text", str, place), item.get("blip_caption")
            if isinstance(caption, str) and caption.strip():  # what the picture in this turn shows
                text = f"{text} (shares a photo: {caption})".strip()
            yield Turn(_get(item, "speaker", str, place), text, _session_time(talk, number, where), ids[0])


def _facts(sample: dict[str, Any], talk: dict[str, Any], where: str) -> Iterator[LocomoFact]:
    observed = _need(sample.get("observation", {}), dict, f"{where}.observation")
    for number, key in _numbered(observed, _OBSERVATION):
        time = _session_time(talk, number, f"{where}.conversation")
        for speaker, items in _get(observed, key, dict, f"{where}.observation").items():
            place = f"{where}.observation.{key}[{speaker!r}]"
            for i, item in enumerate(_need(items, list, place)):
                if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str):
                    raise InvalidInput(f"{place}[{i}] must be [fact, turn id].")
                yield LocomoFact(item[0], time, parse_turn_ids(item[1], f"{place}[{i}][1]"), speaker)


def _questions(sample: dict[str, Any], where: str) -> Iterator[LocomoQuestion]:
    for i, item in enumerate(_need(sample.get("qa", []), list, f"{where}.qa")):
        place = f"{where}.qa[{i}]"
        _need(item, dict, place)
        answer = item.get("answer")
        if isinstance(answer, (list, dict, bool)):
            raise InvalidInput(f"{place}.answer must be text or a number, got {type(answer).__name__}.")
        yield LocomoQuestion(
            question=_get(item, "question", str, place),
            answer=None if answer is None else str(answer),
            category=_get(item, "category", int, place),
            evidence=parse_turn_ids(item.get("evidence", []), f"{place}.evidence"),
        )


def _numbered(mapping: dict[str, Any], pattern: re.Pattern[str]) -> list[tuple[int, str]]:
    """(number, key) of the keys that match, by number: "session_10" comes after "session_9"."""
    return sorted((int(match[1]), key) for key in mapping if (match := pattern.fullmatch(key)))


def _session_time(talk: dict[str, Any], number: int, where: str) -> str | None:
    key = f"session_{number}_date_time"
    return _need(talk[key], str, f"{where}.{key}") if talk.get(key) is not None else None


def _get(mapping: dict[str, Any], key: str, kind: type, where: str) -> Any:
    if key not in mapping:
        raise InvalidInput(f"{where} has no {key!r}; is this a file in LoCoMo's shape?")
    return _need(mapping[key], kind, f"{where}.{key}")


def _need(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidInput(f"{where} must be a {kind.__name__}, got {type(value).__name__}.")
    return value
