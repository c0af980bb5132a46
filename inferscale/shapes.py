"""Mem0's forms: what callers hand in, and what they get back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferscale.core import Fact, FactId, Scope, Turn, clean_text
from inferscale.engine.prompt import Message
from inferscale.errors import InvalidInput
from inferscale.store import text_hash

MAX_TIME_CHARS = 100
OWNERS = {"user_id": "user", "agent_id": "agent", "run_id": "run"}

Messages = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]


def parse_turns(messages: Messages, timestamp: str | None) -> list[Turn]:
    """Messages to remember: `role` or `name`, `content`, and optionally `time` (text as it shall be shown)."""
    turns = []
    for i, message in enumerate(_sequence(messages)):
        content = clean_text(_field(message, "content", i), f"messages[{i}].content")
        speaker = message.get("name") or message.get("role") or "user"
        time = message.get("time") or timestamp
        turns.append(
            Turn(
                speaker=clean_text(speaker, f"messages[{i}].name").strip(),
                text=content.strip(),
                time=None if time is None else _time(time, i),
            )
        )
    return turns


def parse_conversation(messages: Messages) -> list[Message]:
    """Messages to answer, in OpenAI's form; the last one is the user's."""
    conversation = []
    for i, message in enumerate(_sequence(messages)):
        content = clean_text(_field(message, "content", i), f"messages[{i}].content")
        conversation.append(Message(str(message.get("role") or "user"), content))
    if not conversation or conversation[-1].role != "user":
        raise InvalidInput("The conversation must end with a user message.")
    return conversation


def parse_filters(
    filters: Mapping[str, Any] | None, owners: Mapping[str, str | None], tenant: str
) -> tuple[Scope, dict[str, Any]]:
    """Split `filters` into the scope and metadata that must be equal; owners given both ways must agree."""
    given = {key: value for key, value in owners.items() if value is not None}
    wanted: dict[str, Any] = {}
    if not isinstance(filters, Mapping | None):
        raise InvalidInput(f"filters must be a mapping, got {type(filters).__name__}.")
    for key, value in (filters or {}).items():
        if key in OWNERS:
            if given.setdefault(key, value) != value:
                raise InvalidInput(f"{key} is given twice with different values; a filter cannot change the owner.")
        elif isinstance(value, (str, int, float, bool)) or value is None:
            wanted[str(key)] = value
        else:
            raise InvalidInput(f"The filter on {key!r} must be a plain value to be equal to; operators are not known.")
    return parse_scope(given, tenant), wanted


def parse_scope(owners: Mapping[str, str | None], tenant: str) -> Scope:
    """The scope that user_id, agent_id and run_id name. Ids are taken as they are: `*` is a name, not a pattern."""
    return Scope(tenant=tenant, **{OWNERS[key]: value for key, value in owners.items()})


def parse_id(memory_id: object) -> FactId:
    """A memory's id as it was given out."""
    if not isinstance(memory_id, str):
        raise InvalidInput(f"A memory's id is a string, got {type(memory_id).__name__}.")
    return FactId(memory_id)


def parse_count(value: object, name: str) -> int:
    """A number of memories."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidInput(f"{name} counts memories and must be 0 or more, got {value!r}.")
    return value


def parse_metadata(metadata: object) -> dict[str, Any]:
    """Metadata as a mapping of names to JSON values."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
        raise InvalidInput(f"metadata must be a mapping with string keys, got {type(metadata).__name__}.")
    return dict(metadata)


def matches(fact: Fact, wanted: Mapping[str, Any]) -> bool:
    """True if the fact's metadata has every wanted value."""
    missing = object()
    return all(fact.metadata.get(key, missing) == value for key, value in wanted.items())


def item(fact: Fact, score: float | None = None) -> dict[str, Any]:
    """A memory as Mem0 shows it."""
    shown: dict[str, Any] = {
        "id": fact.id,
        "memory": fact.text,
        "hash": text_hash(fact.text),
        "metadata": dict(fact.metadata) or None,
        "created_at": fact.created_at,
        "updated_at": fact.updated_at,
    }
    if score is not None:
        shown["score"] = score
    if fact.time is not None:
        shown["time"] = fact.time
    shown.update({key: owner for key, name in OWNERS.items() if (owner := getattr(fact.scope, name)) is not None})
    return shown


def _sequence(messages: Messages) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping):
        return [messages]
    listed = [m for m in messages if isinstance(m, Mapping)] if isinstance(messages, Sequence) else []
    if not listed or len(listed) != len(messages):
        raise InvalidInput('Pass a text, or a non-empty list of messages like {"role": "user", "content": "…"}.')
    return listed


def _time(value: object, at: int) -> str:
    shown = clean_text(str(value), f"messages[{at}].time").strip()
    if len(shown) > MAX_TIME_CHARS:
        raise InvalidInput(f"messages[{at}].time has {len(shown)} characters; the limit is {MAX_TIME_CHARS}.")
    return shown


def _field(message: Mapping[str, Any], key: str, at: int) -> object:
    if key not in message:
        raise InvalidInput(f"messages[{at}] has no {key!r}.")
    return message[key]
