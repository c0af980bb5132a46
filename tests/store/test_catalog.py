"""The catalog keeps exactly what it was given, all or nothing, for many threads and processes."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscale.core import Fact, FactId, Scope, Turn, TurnId
from inferscale.errors import (
    InvalidInput,
    MemoryNotFound,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreMismatch,
)
from inferscale.store import Catalog, FactRef, text_hash
from tests.store.helpers import ALICE, BOB, VECTOR, add_turns, fact_of, start

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "catalog.sqlite3", busy_timeout=5)


def add(catalog: Catalog, *texts: str, scope: Scope = ALICE) -> list[Fact]:
    return catalog.add_facts([(fact_of(text, scope), VECTOR) for text in texts])


NASTY = [
    "it's; DROP TABLE facts; --",
    'a "quoted" *',
    "../../etc",
    "line\nbreak\ttab",
    "naïve 🐕‍🦺 犬 \u202eabc",
    "\x00",
]


@pytest.mark.parametrize("text", NASTY)
def test_text_is_data_and_round_trips(catalog: Catalog, text: str) -> None:
    scope = Scope(user=text + "x", tenant=text + "x")
    (turn,) = add_turns(catalog, scope, [Turn(text, text, text)])
    fact = Fact(
        FactId(text.replace("\x00", "0")),
        text,
        scope,
        time=text,
        turn_id=turn.id,
        metadata={text: [text, 1, None, True, 0.5]},
    )
    (added,) = catalog.add_facts([(fact, VECTOR)])
    assert catalog.get(fact.id) == added
    assert replace(added, created_at="", updated_at="") == fact
    assert catalog.turns(scope) == [turn]
    assert catalog.list(Scope(user="*")) == []
    assert catalog.list(Scope(user="%", tenant="%")) == []
    assert catalog.history(fact.id)[0].new_memory == text


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, metadata=st.dictionaries(TEXT, TEXT | st.integers(-(2**60), 2**60) | st.none() | st.booleans()))
def test_unicode_round_trips_exactly(catalog: Catalog, text: str, metadata: dict[str, object]) -> None:
    (added,) = catalog.add_facts([(fact_of(text, metadata=metadata), VECTOR)])
    assert catalog.get(added.id) == added
    assert (added.text, added.metadata) == (text, metadata)
    catalog.delete([added.id])


def test_an_id_with_a_nul_is_refused_and_names_no_other_row(catalog: Catalog) -> None:
    catalog.add_facts([(Fact(FactId("a"), "x", ALICE), VECTOR)])
    assert catalog.get(FactId("a\x00b")) is None
    assert catalog.delete([FactId("a\x00b")]).deleted == ()
    with pytest.raises(InvalidInput, match="NUL"):
        catalog.add_facts([(Fact(FactId("a\x00b"), "x", ALICE), VECTOR)])
    with pytest.raises(InvalidInput, match="NUL"):
        add_turns(catalog, ALICE, [Turn("alice", "x", id=TurnId("a\x00b"))])


def test_metadata_is_stored_readably(catalog: Catalog, tmp_path: Path) -> None:
    catalog.add_facts([(fact_of("x", metadata={"城市": "東京"}), VECTOR)])
    catalog.close()
    assert "東京".encode() in (tmp_path / "catalog.sqlite3").read_bytes()


@pytest.mark.parametrize("metadata", [{"x": object()}, {"x": float("nan")}, {"x": "\ud800"}])
def test_metadata_that_is_not_json_is_refused(catalog: Catalog, metadata: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        catalog.add_facts([(fact_of("x", metadata=metadata), VECTOR)])
    assert catalog.list(ALICE) == []


def test_turns_keep_their_order_and_scope(catalog: Catalog) -> None:
    turns = add_turns(catalog, ALICE, [Turn("alice", f"t{i}") for i in range(5)])
    add_turns(catalog, BOB, [Turn("bob", "other")])
    more = add_turns(catalog, ALICE, [Turn("alice", "t5", id=TurnId("given"))])
    assert catalog.turns(ALICE) == turns + more
    assert more[0].id == "given"


def test_facts_are_added_all_or_none(catalog: Catalog) -> None:
    good, clash = fact_of("good"), fact_of("clash")
    catalog.add_facts([(clash, VECTOR)])
    revision = catalog.revision()
    for bad in (clash, fact_of("no turn", turn_id=TurnId("none"))):
        with pytest.raises(InvalidInput):
            catalog.add_facts([(good, VECTOR), (bad, VECTOR)])
    assert catalog.get(good.id) is None
    assert list(catalog.history(good.id)) == []
    assert catalog.revision() == revision
    assert catalog.add_facts([]) == []


def test_a_fact_cannot_point_at_a_turn_of_another_scope(catalog: Catalog) -> None:
    (turn,) = add_turns(catalog, BOB, [Turn("bob", "secret")])
    with pytest.raises(InvalidInput, match="scope"):
        catalog.add_facts([(fact_of("x", ALICE, turn.id), VECTOR)])


def test_embeddings_come_back_in_order(catalog: Catalog) -> None:
    vectors = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    facts = [fact_of(f"f{i}") for i in range(5)]
    catalog.add_facts([(fact, vectors[i] if i % 2 else vectors[i].tobytes()) for i, fact in enumerate(facts)])
    ids, stored = catalog.embeddings(ALICE.id)
    assert ids == tuple(fact.id for fact in facts)
    assert stored.dtype == np.float32
    assert np.array_equal(stored, vectors)
    assert stored.flags.writeable
    assert catalog.embeddings(BOB.id)[1].shape == (0, 0)


def test_embeddings_of_another_dimension_are_refused(catalog: Catalog) -> None:
    (fact,) = add(catalog, "x")
    for call in (
        lambda: catalog.add_facts([(fact_of("y"), np.ones(5, np.float32))]),
        lambda: catalog.update(fact.id, "y", embedding=np.ones(5, np.float32)),
    ):
        with pytest.raises(StoreMismatch, match="4 dimensions"):
            call()
    assert [f.text for f in catalog.list(ALICE)] == ["x"]
    for malformed in (b"", b"abc", np.ones((2, 2), np.float32)):
        with pytest.raises(InvalidInput):
            catalog.add_facts([(fact_of("y"), malformed)])


def test_duplicates_are_found_within_their_scope_only(catalog: Catalog) -> None:
    first, _, other = add(catalog, "same", "same", "other")
    add(catalog, "theirs", scope=BOB)
    (dated,) = catalog.add_facts([(fact_of("same", time="8 May 2023"), VECTOR)])
    found = catalog.find_duplicates(ALICE, ["same", "other", "theirs", "none"])
    assert found == {("same", None): first.id, ("same", "8 May 2023"): dated.id, ("other", None): other.id}


def test_an_update_keeps_owner_metadata_and_creation_time(catalog: Catalog) -> None:
    (fact,) = catalog.add_facts([(fact_of("old", metadata={"a": 1}), VECTOR)])
    new = catalog.update(fact.id, "new", embedding=VECTOR + 1)
    assert new == replace(fact, text="new", updated_at=new.updated_at)
    assert new.updated_at >= fact.updated_at
    assert catalog.get(fact.id) == new
    assert np.array_equal(catalog.embeddings(ALICE.id)[1][0], VECTOR + 1)
    assert catalog.find_duplicates(ALICE, ["new", "old"]) == {("new", None): fact.id}
    assert catalog.update(fact.id, metadata={}).metadata == {}
    with pytest.raises(InvalidInput, match="embedding"):
        catalog.update(fact.id, "newer")
    with pytest.raises(MemoryNotFound):
        catalog.update(FactId("none"), metadata={})
    with pytest.raises(MemoryNotFound):
        catalog.update(fact.id, metadata={}, within=BOB)


def test_history_has_mem0s_shape(catalog: Catalog) -> None:
    (fact,) = add(catalog, "old")
    catalog.update(fact.id, "new", embedding=VECTOR)
    rows = [(e.memory_id, e.event, e.old_memory, e.new_memory, e.is_deleted) for e in catalog.history(fact.id)]
    assert rows == [(fact.id, "ADD", None, "old", False), (fact.id, "UPDATE", "old", "new", False)]
    catalog.delete([fact.id])
    rows = [(e.memory_id, e.event, e.old_memory, e.new_memory, e.is_deleted) for e in catalog.history(fact.id)]
    assert rows == [(fact.id, "DELETE", None, None, True)]
    assert catalog.history(fact.id)[0].created_at == fact.created_at


def test_derivations_lead_from_what_is_forgotten_to_what_was_computed_from_it(catalog: Catalog) -> None:
    (turn,) = add_turns(catalog, ALICE, [Turn("alice", "said")])
    (source,) = catalog.add_facts([(fact_of("source", turn_id=turn.id), VECTOR)])
    by_fact, by_turn, free = add(catalog, "by fact", "by turn", "free")
    assert turn.id is not None
    assert catalog.set_derivations(by_fact.id, text_hash("by fact"), [(source.id, "fact")], published=True)
    assert catalog.set_derivations(by_turn.id, text_hash("by turn"), [(turn.id, "turn")], published=True)
    assert catalog.set_derivations(free.id, text_hash("free"), [], published=True)
    refs = (FactRef(ALICE.id, by_fact.id), FactRef(ALICE.id, by_turn.id))
    assert catalog.dependents([source.id, turn.id]) == list(refs)
    assert catalog.broken_derivations() == []
    result = catalog.delete([source.id])
    assert (result.deleted, result.dependents) == ((FactRef(ALICE.id, source.id),), refs)
    assert catalog.turns(ALICE) == []
    assert catalog.broken_derivations() == list(refs)
    assert catalog.set_derivations(by_fact.id, text_hash("by fact"), [(free.id, "fact")], published=True)
    assert catalog.broken_derivations() == [refs[1]]


def test_kv_of_what_changed_meanwhile_must_not_be_published(catalog: Catalog) -> None:
    fact, companion = add(catalog, "fact", "companion")
    (foreign,) = add(catalog, "foreign", scope=BOB)
    current = text_hash("fact")
    assert not catalog.set_derivations(FactId("none"), current, [], published=True)
    assert not catalog.set_derivations(fact.id, text_hash("older"), [], published=True)
    assert not catalog.set_derivations(fact.id, current, [(companion.id, "fact"), ("none", "fact")], published=True)
    assert not catalog.set_derivations(fact.id, current, [(companion.id, "turn")], published=True)
    assert not catalog.set_derivations(fact.id, current, [(foreign.id, "fact")], published=True)
    assert catalog.dependents([companion.id]) == []
    assert catalog.set_derivations(fact.id, current, [(companion.id, "fact"), (companion.id, "fact")], published=True)


def test_until_a_chunk_is_published_its_older_sources_count_too(catalog: Catalog) -> None:
    fact, old, new = add(catalog, "fact", "old", "new")
    record = (fact.id, text_hash("fact"))
    assert catalog.set_derivations(*record, [(old.id, "fact")], published=True)
    assert catalog.set_derivations(*record, [(new.id, "fact")], published=False)
    assert catalog.sources([fact.id]) == {fact.id: {old.id, new.id}}
    assert catalog.set_derivations(*record, [(new.id, "fact")], published=True)
    assert catalog.sources([fact.id]) == {fact.id: {new.id}}


def test_deleting_a_fact_deletes_every_turn_that_said_it(catalog: Catalog) -> None:
    first, again, other = (Turn("alice", text, id=TurnId(text)) for text in ("said", "said again", "other"))
    fact = fact_of("said", turn_id=first.id)
    catalog.add_facts([(fact, VECTOR)], [first])
    catalog.add_facts([(fact_of("new", turn_id=again.id), VECTOR)], [again], [(fact.id, TurnId("said again"))])
    catalog.add_facts([(fact_of("other", turn_id=other.id), VECTOR)], [other])
    catalog.delete([fact.id])
    assert [turn.text for turn in catalog.turns(ALICE)] == ["other"]


def test_meta_is_kept(catalog: Catalog, tmp_path: Path) -> None:
    assert catalog.meta_get("embedder") is None
    catalog.adopt({"embedder": "a"})
    catalog.adopt({"embedder": "b"})
    assert Catalog(tmp_path / "catalog.sqlite3", 5).meta_get("embedder") == "b"


def test_forty_concurrent_adds_all_stay(catalog: Catalog) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            (turn,) = add_turns(catalog, ALICE, [Turn("alice", f"turn {number}")])
            catalog.add_facts([(fact_of(f"fact {number}", turn_id=turn.id), VECTOR)])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {fact.text for fact in catalog.list(ALICE)} == {f"fact {number}" for number in range(40)}


WRITER = """
import sys; from pathlib import Path; import numpy as np
from inferscale.core import Fact, FactId, Scope
from inferscale.store import Catalog
catalog = Catalog(Path(sys.argv[1]), 30)
for i in range(50):
    fact = Fact(FactId(f"{sys.argv[2]}-{i}"), f"{sys.argv[2]} {i}", Scope(user="alice"))
    catalog.add_facts([(fact, np.ones(4, np.float32))])
"""


def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite3"  # neither exists: they also race to make it
    writers = [start(WRITER, str(path), name) for name in ("a", "b")]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    found = {fact.id for fact in Catalog(path, 5).list(ALICE)}
    assert found == {f"{name}-{i}" for name in ("a", "b") for i in range(50)}


def test_the_wait_for_another_process_is_bounded(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.sqlite3", busy_timeout=0.05)
    other = sqlite3.connect(tmp_path / "catalog.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy, match="try again"):
        add(catalog, "x")
    assert catalog.list(ALICE) == []  # reading goes on
    other.execute("ROLLBACK")
    add(catalog, "x")
    other.close()


def test_the_wait_for_another_thread_is_bounded(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.sqlite3", busy_timeout=0.05)
    with catalog._db.write(), pytest.raises(StoreBusy, match="thread"):
        catalog.list(ALICE)


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to have a header" * 40, b"SQLite format 3\0" * 80]
)
def test_a_file_that_is_no_catalog_is_refused_and_untouched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "catalog.sqlite3"
    path.write_bytes(content)
    with pytest.raises(StoreDamaged):
        Catalog(path, 1)
    assert path.read_bytes() == content


def test_a_foreign_database_and_a_newer_schema_are_refused(tmp_path: Path) -> None:
    foreign = sqlite3.connect(tmp_path / "foreign")
    foreign.execute("CREATE TABLE t (x)")
    foreign.close()
    with pytest.raises(StoreDamaged, match="not a catalog"):
        Catalog(tmp_path / "foreign", 1)
    Catalog(tmp_path / "new", 1).adopt({"schema_version": "2"})
    with pytest.raises(StoreMismatch, match="upgrade"):
        Catalog(tmp_path / "new", 1)


def test_a_forked_child_is_refused(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("inferscale.store.sqlite.os.getpid", lambda: -1)
        with pytest.raises(StoreError, match="fork"):
            catalog.list(ALICE)
        catalog.close()
    assert catalog.list(ALICE) == []


def test_a_closed_catalog_says_so(catalog: Catalog, tmp_path: Path) -> None:
    catalog.close()
    catalog.close()
    with pytest.raises(StoreError):
        catalog.list(ALICE)
    assert not (tmp_path / "catalog.sqlite3-wal").exists()


def test_the_catalog_is_readable_by_its_owner_alone(catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, "private")
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}
