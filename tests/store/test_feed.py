"""Another process learns of every put and delete, or is told to reload."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inferscale.core import FactId, Scope
from inferscale.errors import InvalidInput
from inferscale.store import RELOAD, Catalog, Change, feed, text_hash
from tests.store.helpers import ALICE, BOB, VECTOR, fact_of


@pytest.fixture
def two(tmp_path: Path) -> tuple[Catalog, Catalog]:
    return Catalog(tmp_path / "c", 5), Catalog(tmp_path / "c", 5)


def test_a_reader_sees_each_change_once_and_in_order(two: tuple[Catalog, Catalog]) -> None:
    writer, reader = two
    rev = reader.revision()
    assert reader.changes_since(rev) == (rev, [])
    a, b = writer.add_facts([(fact_of("a"), VECTOR), (fact_of("b", BOB), VECTOR)])
    writer.update(a.id, metadata={"x": 1})
    writer.delete([a.id])
    writer.delete_scope(BOB)
    new, changes = reader.changes_since(rev)
    expected = [("put", a), ("put", b), ("put", a), ("delete", a), ("delete", b)]
    assert changes == [Change(op, fact.scope.id, fact.id) for op, fact in expected]
    assert reader.changes_since(new) == (new, [])


def test_facts_whose_kv_went_stale_are_announced_too(two: tuple[Catalog, Catalog]) -> None:
    writer, reader = two
    source, derived = writer.add_facts([(fact_of("source"), VECTOR), (fact_of("derived"), VECTOR)])
    writer.set_derivations(derived.id, text_hash("derived"), [(source.id, "fact")], published=True)
    rev = reader.revision()
    writer.update(source.id, "changed", embedding=VECTOR)
    writer.delete([source.id])
    puts = Change("put", ALICE.id, derived.id)
    assert reader.changes_since(rev)[1] == [
        Change("put", ALICE.id, source.id),
        puts,
        Change("delete", ALICE.id, source.id),
        puts,
    ]


def test_a_reader_behind_the_feed_is_told_to_reload(
    two: tuple[Catalog, Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "KEEP_CHANGES", 3)
    writer, reader = two
    start = reader.revision()
    for i in range(5):
        writer.add_facts([(fact_of(str(i)), VECTOR)])
    now = reader.revision()
    assert now == start + 5
    assert reader.changes_since(start) == (now, RELOAD)
    assert reader.changes_since(now - 4) == (now, RELOAD)
    assert len(list(reader.changes_since(now - 3)[1])) == 3
    assert reader.changes_since(now + 1) == (now, RELOAD)  # of another, longer-lived catalog


def test_adopting_the_store_makes_every_reader_reload(two: tuple[Catalog, Catalog]) -> None:
    writer, reader = two
    for fill in (False, True):
        if fill:
            (fact,) = writer.add_facts([(fact_of("x"), VECTOR)])
        rev = reader.revision()
        writer.adopt({"embedder": "new"}, [(fact.id, VECTOR[:3])] if fill else None)
        new, answer = reader.changes_since(rev)
        assert answer is RELOAD
        assert reader.changes_since(new) == (new, [])
    assert reader.meta_get("embedder") == "new"
    assert np.array_equal(reader.embeddings(ALICE.id)[1], [VECTOR[:3]])


def test_adopting_needs_an_embedding_of_every_fact(two: tuple[Catalog, Catalog]) -> None:
    writer, reader = two
    (fact,) = writer.add_facts([(fact_of("x"), VECTOR)])
    for wrong in ([], [(fact.id, VECTOR), (fact.id, VECTOR)], [(FactId("none"), VECTOR)]):
        with pytest.raises(InvalidInput):
            writer.adopt({"embedder": "new"}, wrong)
    assert reader.meta_get("embedder") is None


def test_data_version_moves_when_another_catalog_commits_and_only_then(two: tuple[Catalog, Catalog]) -> None:
    writer, reader = two
    before, own = reader.data_version(), writer.data_version()
    assert reader.data_version() == before
    writer.add_facts([(fact_of("x"), VECTOR)])
    assert reader.data_version() != before
    assert writer.data_version() == own
    assert [fact.text for fact in reader.list(Scope(user="alice"))] == ["x"]
