"""Mem0's verbs: shapes, scopes, edits."""

from __future__ import annotations

from typing import Any

import pytest

from inferscale import Memory
from inferscale.errors import ConfigError, InvalidInput, InvalidScope, MemoryNotFound


def add(memory: Memory, text: str, **owner: Any) -> str:
    (result,) = memory.add(text, infer=False, **(owner or {"user_id": "alice"}))["results"]
    assert result["event"] == "ADD"
    return str(result["id"])


def texts(found: dict[str, Any]) -> list[str]:
    return [item["memory"] for item in found["results"]]


def test_what_is_added_is_found_listed_and_got(memory: Memory) -> None:
    rex = add(memory, "Rex is a border collie.")
    add(memory, "Ana plays the cello.")
    found = memory.search("Which breed is the dog?", user_id="alice", top_k=2)["results"]
    assert [item["memory"] for item in found] == ["Rex is a border collie.", "Ana plays the cello."]
    assert found[0]["score"] > found[1]["score"]
    one = memory.get(rex)
    assert one is not None
    assert {"id", "memory", "hash", "metadata", "created_at", "updated_at", "user_id"} <= set(one)
    assert (one["memory"], one["user_id"], one["metadata"]) == ("Rex is a border collie.", "alice", None)
    assert texts(memory.get_all(user_id="alice")) == ["Rex is a border collie.", "Ana plays the cello."]
    assert texts(memory.get_all(filters={"user_id": "alice"}, top_k=1)) == ["Rex is a border collie."]


def test_messages_become_facts_with_speaker_and_date(memory: Memory) -> None:
    memory.add(
        [
            {"role": "user", "name": "Tom", "content": "I moved to Lisbon. I bake bread.", "time": "8 May 2023"},
            {"role": "assistant", "content": "How lovely."},
        ],
        user_id="tom",
        metadata={"source": "chat"},
    )
    found = memory.get_all(user_id="tom")["results"]
    assert [item["memory"] for item in found] == [
        "Tom: I moved to Lisbon.",
        "Tom: I bake bread.",
        "assistant: How lovely.",
    ]
    assert [item.get("time") for item in found] == ["8 May 2023", "8 May 2023", None]
    assert all(item["metadata"] == {"source": "chat"} for item in found)


def test_the_same_memory_twice_is_kept_once(memory: Memory) -> None:
    first = add(memory, "Rex is a collie.")
    (again,) = memory.add("Rex is a collie.", user_id="alice", infer=False)["results"]
    assert (again["id"], again["event"]) == (first, "NONE")
    add(memory, "Rex is a collie.", user_id="bob")
    assert len(memory.get_all(user_id="alice")["results"]) == 1


def test_the_same_words_on_another_day_are_another_memory(memory: Memory) -> None:
    for day in ("8 May 2023", "9 June 2024"):
        memory.add("I ran a marathon.", user_id="alice", timestamp=day)
    found = memory.search("marathon", user_id="alice")["results"]
    assert sorted(item["time"] for item in found) == ["8 May 2023", "9 June 2024"]


def test_settings_may_be_a_mapping_and_unknown_ones_are_refused(open_memory: Any) -> None:
    assert open_memory(config={"encode": {"companions": 2}}).config.encode.companions == 2
    with pytest.raises(ConfigError, match="Unknown option 'companion'"):
        open_memory(config={"encode": {"companion": 2}})


def test_update_keeps_owner_and_metadata_and_is_searchable_at_once(memory: Memory) -> None:
    (result,) = memory.add("Rex is a collie.", user_id="alice", metadata={"k": 1, "user": "x"}, infer=False)["results"]
    memory.update(result["id"], "Tom collects stamps.", metadata={"j": 2})
    item = memory.get(result["id"])
    assert item is not None
    assert (item["memory"], item["user_id"]) == ("Tom collects stamps.", "alice")
    assert item["metadata"] == {"k": 1, "user": "x", "j": 2}
    assert texts(memory.search("stamp collecting", user_id="alice", top_k=1)) == ["Tom collects stamps."]
    events = [(e["event"], e["old_memory"], e["new_memory"]) for e in memory.history(result["id"])]
    assert events == [("ADD", None, "Rex is a collie."), ("UPDATE", "Rex is a collie.", "Tom collects stamps.")]


def test_deleting_all_of_one_user_touches_no_other_and_leaves_none(memory: Memory) -> None:
    for i in range(130):
        memory.add(f"Fact number {i}.", user_id="alice", infer=False)
    add(memory, "Bob's secret.", user_id="bob")
    add(memory, "Agent's own.", agent_id="alice")
    assert memory.delete_all(user_id="alice")["deleted"] == 130
    assert memory.get_all(user_id="alice")["results"] == []
    assert texts(memory.get_all(user_id="bob")) == ["Bob's secret."]
    assert texts(memory.get_all(agent_id="alice")) == ["Agent's own."]


def test_a_deleted_memory_is_gone_at_once_and_its_history_holds_no_text(memory: Memory) -> None:
    rex = add(memory, "Rex is a border collie.")
    memory.update(rex, "Rex is a poodle.")
    memory.delete(rex)
    assert memory.get(rex) is None
    assert memory.search("Rex", user_id="alice")["results"] == []
    assert [(e["event"], e["old_memory"], e["new_memory"]) for e in memory.history(rex)] == [("DELETE", None, None)]
    with pytest.raises(MemoryNotFound, match="There is no memory"):
        memory.delete(rex)


def test_narrow_owners_are_seen_from_wide_ones_and_not_the_other_way(memory: Memory) -> None:
    add(memory, "In the run.", user_id="alice", run_id="r1")
    add(memory, "Of the user.", user_id="alice")
    assert set(texts(memory.get_all(user_id="alice"))) == {"In the run.", "Of the user."}
    assert texts(memory.get_all(user_id="alice", run_id="r1")) == ["In the run."]
    assert texts(memory.search("run", user_id="alice", run_id="r2")) == []


@pytest.mark.parametrize(
    "filters",
    [
        {"user_id": "*"},
        {"user_id": "%"},
        {"user_id": "bob' OR 1=1 --"},
        {"agent_id": "alice"},
    ],
)
def test_no_pattern_or_quote_widens_a_scope(memory: Memory, filters: dict[str, str]) -> None:
    add(memory, "Alice's secret.")
    assert memory.get_all(filters=filters)["results"] == []
    assert memory.search("secret", filters=filters)["results"] == []


@pytest.mark.parametrize(
    "filters",
    [
        {"user_id": "bob"},
        {"AND": [{"user_id": "bob"}]},
        {"OR": [{"user_id": "bob"}, {"user_id": "alice"}]},
        {"user_id": {"ne": "alice"}},
        {"color": {"in": ["red"]}},
    ],
)
def test_a_filter_that_would_change_the_owner_or_is_not_understood_is_refused(
    memory: Memory, filters: dict[str, Any]
) -> None:
    add(memory, "Bob's secret.", user_id="bob")
    with pytest.raises(InvalidInput):
        memory.search("secret", filters=filters, user_id="alice")


def test_metadata_filters_look_past_better_hits_that_do_not_match(memory: Memory) -> None:
    for i in range(30):
        memory.add(f"The dog number {i}.", user_id="alice", infer=False, metadata={"kind": "dog"})
    memory.add("Unrelated tax form.", user_id="alice", infer=False, metadata={"kind": "tax"})
    found = memory.search("dog", user_id="alice", top_k=3, filters={"kind": "tax"})
    assert texts(found) == ["Unrelated tax form."]


@pytest.mark.parametrize("call", ["add", "search", "get_all", "delete_all", "chat"])
def test_every_verb_needs_an_owner(memory: Memory, call: str) -> None:
    arguments = {"add": ("x",), "search": ("x",), "chat": ("x",)}.get(call, ())
    with pytest.raises(InvalidScope, match="pass user_id, agent_id or run_id"):
        getattr(memory, call)(*arguments)


def test_another_tenant_sees_and_changes_nothing(open_memory: Any) -> None:
    ours, theirs = open_memory(), open_memory(tenant="other")
    rex = add(ours, "Rex is a collie.")
    assert theirs.get(rex) is None
    assert theirs.get_all(user_id="alice")["results"] == []
    assert theirs.history(rex) == []
    assert theirs.search("Rex", user_id="alice")["results"] == []
    for change in (lambda: theirs.update(rex, "gone"), lambda: theirs.delete(rex)):
        with pytest.raises(MemoryNotFound):
            change()
    theirs.delete_all(user_id="alice")
    theirs.reset()
    assert texts(ours.get_all(user_id="alice")) == ["Rex is a collie."]
    ours.delete(rex)
    assert theirs.history(rex) == []
    assert len(ours.history(rex)) == 1


def test_reset_forgets_everything_of_the_tenant(memory: Memory) -> None:
    add(memory, "Rex is a collie.")
    add(memory, "Bob's own.", user_id="bob")
    memory.reset()
    assert memory.get_all(user_id="alice")["results"] == memory.get_all(user_id="bob")["results"] == []
    add(memory, "Rex is back.")
    assert texts(memory.search("Rex", user_id="alice")) == ["Rex is back."]
