"""Plan records: what vLLM's processes are told, and what nobody may talk them into."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inferscale.compose import PlanFact, build_plan
from inferscale.core import ChunkKey, ChunkKV, FactId, Plan, Recipe, Scope, token_digest
from inferscale.engine.vllm import plans
from inferscale.engine.vllm.plans import PlanBoard, PlanRecord, header_key, record_of
from inferscale.errors import PlanRejected
from inferscale.store import DiskStore

ALICE, BOB = Scope(user="alice"), Scope(user="bob")
RECIPE = Recipe("m" * 64, "float32", "t" * 64, "h" * 64, 0, 0, "exact", 1)
HEADER = (1, 2, 3)


def chunk(tokens: tuple[int, ...], value: float = 0.0) -> ChunkKV:
    kv = torch.full((2, len(tokens), 1, 4), value)
    return ChunkKV(tokens, kv, kv.clone())


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv", budget_bytes=1 << 30)


def planned(store: DiskStore, scope: Scope = ALICE, value: float = 0.0) -> Plan:
    """A plan of two facts whose chunks are in the store."""
    facts = []
    for tokens in ((4, 5), (6, 7, 8)):
        key = ChunkKey(scope.id, FactId(f"f{tokens[0]}"), RECIPE.id, token_digest(tokens))
        store.put_many([(key, chunk(tokens, value))])
        facts.append(PlanFact(tokens, key))
    store.put_many([(header_key(RECIPE, HEADER), chunk(HEADER))])
    return build_plan(scope, RECIPE.id, HEADER, facts)


def record(store: DiskStore, plan: Plan) -> PlanRecord:
    return record_of(plan, RECIPE, store.folder)


def test_a_record_is_read_as_it_was_published_until_it_is_retired(store: DiskStore) -> None:
    plan, board = planned(store), PlanBoard(store.folder)
    board.publish(plan.id, record(store, plan))
    seen = PlanBoard(store.folder).read(plan.id)
    assert seen == replace(record(store, plan), expires=seen.expires)
    assert seen.tokens == len(plan.token_ids)
    assert [c.start for c in seen.chunks] == [0, 3, 5]
    board.retire(plan.id)
    board.retire(plan.id)
    with pytest.raises(PlanRejected) as error:
        board.read(plan.id)
    assert error.value.reason == "unknown_plan"


def test_a_record_is_readable_by_its_owner_alone_and_holds_no_text(store: DiskStore) -> None:
    plan, board = planned(store), PlanBoard(store.folder)
    board.publish(plan.id, record(store, plan))
    path = store.folder / plans.FOLDER / plan.id
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    assert "token_ids" not in path.read_text()


def test_plan_ids_cannot_be_guessed(store: DiskStore) -> None:
    one, other = planned(store), planned(store)
    assert one.id != other.id
    assert len(one.id) >= 22


@given(st.one_of(st.none(), st.integers(), st.text(), st.lists(st.text()), st.dictionaries(st.text(), st.text())))
def test_no_id_that_a_client_sends_leads_anywhere(tmp_path_factory: Any, name: Any) -> None:
    board = PlanBoard(tmp_path_factory.getbasetemp() / "garbage")
    with pytest.raises(PlanRejected) as error:
        board.read(name)
    assert error.value.reason == "unknown_plan"


@pytest.mark.parametrize("name", ["../../../../etc/passwd", "..", "/etc/hostname-hostname", "a" * 65, "a" * 16 + "\n"])
def test_an_id_is_never_a_path(store: DiskStore, name: str) -> None:
    board = PlanBoard(store.folder)
    with pytest.raises(PlanRejected):
        board.read(name)
    assert not board.has(name)
    board.note(name, "unknown_plan")
    assert not list((store.folder / plans.FOLDER).iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: b"",
        lambda value: b"\xff\xfe garbage",
        lambda value: b"[" * 100_000,
        lambda value: json.dumps(value)[:-20].encode(),
        lambda value: json.dumps({**value, "version": 99}).encode(),
        lambda value: json.dumps({**value, "chunks": []}).encode(),
        lambda value: json.dumps({**value, "chunks": [["", "", "", 3]]}).encode(),
        lambda value: json.dumps({**value, "chunks": [[1, 2, 3, 3]]}).encode(),
        lambda value: json.dumps({**value, "chunks": [[*value["chunks"][0][:3], -1]]}).encode(),
        lambda value: json.dumps({**value, "recipe": {"model": 1}}).encode(),
        lambda value: json.dumps({**value, "salt": None}).encode(),
        lambda value: json.dumps(value).encode() + b" " * plans.MAX_RECORD_BYTES,
    ],
)
def test_a_damaged_record_is_refused_whatever_is_in_it(store: DiskStore, damage: Callable[[Any], bytes]) -> None:
    plan, board = planned(store), PlanBoard(store.folder)
    board.publish(plan.id, record(store, plan))
    path = store.folder / plans.FOLDER / plan.id
    path.write_bytes(damage(json.loads(path.read_text())))
    with pytest.raises(PlanRejected) as error:
        board.read(plan.id)
    assert error.value.reason == "damaged_plan"


def test_a_record_expires(store: DiskStore) -> None:
    plan, board = planned(store), PlanBoard(store.folder)
    board.publish(plan.id, replace(record(store, plan), expires=time.time() - 1))
    with pytest.raises(PlanRejected) as error:
        board.read(plan.id)
    assert error.value.reason == "expired_plan"


def test_the_sweep_takes_what_is_over_and_leaves_what_waits(store: DiskStore) -> None:
    board = PlanBoard(store.folder)
    over, waiting, fresh = (planned(store) for _ in range(3))
    board.publish(over.id, replace(record(store, over), expires=time.time() - 1))
    board.publish(waiting.id, record(store, waiting))
    board.publish(fresh.id, record(store, fresh))
    folder = store.folder / plans.FOLDER
    (folder / "0123456789abcdef.tmp").write_text("of a killed process")
    old = time.time() - 2 * plans.EXPIRES_AFTER
    for name in (over.id, waiting.id, "0123456789abcdef.tmp"):
        os.utime(folder / name, (old, old))
    assert board.sweep() == 2
    assert {path.name for path in folder.iterdir()} == {waiting.id, fresh.id}


def test_a_note_reaches_the_planner_and_goes_with_the_record(store: DiskStore) -> None:
    plan, board = planned(store), PlanBoard(store.folder)
    board.publish(plan.id, record(store, plan))
    assert board.noted(plan.id) is None
    PlanBoard(store.folder).note(plan.id, "missing_chunk")
    assert board.noted(plan.id) == "missing_chunk"
    board.retire(plan.id)
    board.note(plan.id, "too_late")  # nobody waits for it: nothing is left behind
    assert board.noted(plan.id) is None
    assert not list((store.folder / plans.FOLDER).iterdir())


def test_the_salt_names_owner_recipe_and_contents(store: DiskStore) -> None:
    salt = record(store, planned(store)).salt
    assert record(store, planned(store)).salt == salt
    assert record(store, planned(store, BOB)).salt != salt
    # The same key, made again with other contents: blocks of the old ones must not be found.
    assert record(store, planned(store, value=1.0)).salt != salt


def test_a_plan_whose_chunk_is_gone_gets_no_record(store: DiskStore) -> None:
    plan = planned(store)
    store.discard([plan.chunks[1].key])
    with pytest.raises(PlanRejected) as error:
        record(store, plan)
    assert error.value.reason == "missing_chunk"
