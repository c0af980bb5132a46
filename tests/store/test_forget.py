"""Forgetting is complete: the data directory's bytes are searched for what was deleted."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from uuid import uuid4

import pytest

from inferscale.config import StoreConfig
from inferscale.core import Fact, FactId, Scope, Turn
from inferscale.store import Catalog, Store, open_store
from tests.store.helpers import ALICE, BOB, VECTOR, add_turns, all_bytes, fact_of, item, raw


def remember(store: Store, scope: Scope, marker: str, seed: int) -> tuple[Fact, bytes]:
    """A fact whose marker stands in every text there is; returns it and its KV's bytes."""
    (turn,) = add_turns(store.catalog, scope, [Turn(marker, f"{marker} said", marker)])
    fact = fact_of(f"{marker} is", scope, turn.id, time=marker, metadata={"note": marker})
    (fact,) = store.catalog.add_facts([(fact, VECTOR + seed)])
    fact = store.catalog.update(fact.id, f"{marker} was", embedding=VECTOR + seed + 1)
    key, kv = item(fact.id, seed=seed, scope=scope.id)
    store.chunks.put_many([(key, kv)])
    store.chunks.get_many([key])
    return fact, raw(kv.keys)


@pytest.mark.parametrize("how", ["delete", "delete_scope"])
def test_nothing_of_a_forgotten_memory_is_left_on_disk(tmp_path: Path, how: str) -> None:
    store, other = open_store(tmp_path, StoreConfig()), open_store(tmp_path, StoreConfig())
    marked = Scope(user="OWNER-7f3a")
    gone, gone_kv = remember(store, marked, "MARKER-GONE", 1)
    kept, kept_kv = remember(store, BOB, "MARKER-KEPT", 5)
    traces = [b"MARKER-GONE", b"OWNER-7f3a", gone_kv, (VECTOR + 1).tobytes(), (VECTOR + 2).tobytes()]
    before = all_bytes(tmp_path)
    assert [trace for trace in traces if trace not in before] == []

    if how == "delete":
        for ref in store.catalog.delete([gone.id]).deleted:
            store.chunks.delete(*ref)
    else:
        result = store.catalog.delete_scope(marked)
        assert result.scopes == (marked.id,)
        for scope in result.scopes:
            store.chunks.delete_scope(scope)

    after = all_bytes(tmp_path)
    assert [trace for trace in traces if trace in after] == []
    assert store.chunks.get_many([item(gone.id, scope=marked.id)[0]]) == [None]
    assert store.catalog.get(kept.id) == kept
    assert b"MARKER-KEPT" in after
    assert kept_kv in after
    assert [event.event for event in other.catalog.history(gone.id)] == (["DELETE"] if how == "delete" else [])
    store.close()
    other.close()


def test_forgetting_a_tenant_leaves_nothing_of_it(tmp_path: Path) -> None:
    store = open_store(tmp_path, StoreConfig())
    _, kv = remember(store, ALICE, "MARKER", 1)
    remember(store, Scope(user="else", tenant="other"), "KEPT", 2)
    for scope in store.catalog.delete_scope("default").scopes:
        store.chunks.delete_scope(scope)
    left = all_bytes(tmp_path)
    assert b"MARKER" not in left
    assert b"alice" not in left
    assert kv not in left
    assert b"KEPT" in left
    store.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", [30, 900, 6000])
def test_rows_that_moved_between_pages_leave_no_copies(tmp_path: Path, length: int, seed: int) -> None:
    """SQLite moves rows when pages split or merge; a stale copy of a row would outlive its deletion."""
    rng = random.Random(seed)
    catalog = Catalog(tmp_path / "catalog.sqlite3", 5)
    living: dict[FactId, list[str]] = {}
    dead: list[str] = []
    for _ in range(60):
        marker, filler = uuid4().hex, "x" * rng.randrange(length)
        choice = rng.random()
        if choice < 0.5 or not living:
            (turn,) = add_turns(catalog, ALICE, [Turn("alice", marker + filler)])
            (fact,) = catalog.add_facts([(fact_of(filler + marker, turn_id=turn.id), VECTOR)])
            living[fact.id] = [marker]
            continue
        chosen = rng.choice(list(living))
        if choice < 0.75:
            catalog.update(chosen, marker + filler, embedding=VECTOR)
            living[chosen].append(marker)
        else:
            catalog.delete([chosen])
            dead += living.pop(chosen)
    left = all_bytes(tmp_path)
    assert len(dead) > 5
    assert [marker for marker in dead if marker.encode() in left] == []
    assert all(markers[-1].encode() in left for markers in living.values())
    catalog.close()


def test_a_reader_delays_the_wal_and_the_next_scrub_finishes(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.sqlite3", busy_timeout=0.05)
    (fact,) = catalog.add_facts([(fact_of("MARKER"), VECTOR)])
    reader = sqlite3.connect(tmp_path / "catalog.sqlite3", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM facts").fetchone()
    catalog.delete([fact.id])
    assert b"MARKER" in all_bytes(tmp_path)
    assert not catalog.scrub()
    reader.execute("COMMIT")
    assert catalog.scrub()
    assert b"MARKER" not in all_bytes(tmp_path)
    assert catalog.scrub()
    reader.close()
    catalog.close()
