"""A scope is a wall: SQL reaches exactly what `Scope.covers` allows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale.core import Fact, Scope, Turn
from inferscale.errors import InvalidScope
from inferscale.store import Catalog
from tests.store.helpers import VECTOR, add_turns, fact_of

FIELD = st.none() | st.sampled_from(["a", "b", "*", "a' OR 1=1 --", "%"])


@st.composite
def scopes(draw: st.DrawFn) -> Scope:
    user, agent, run = draw(FIELD), draw(FIELD), draw(FIELD)
    try:
        return Scope(user, agent, run, draw(st.sampled_from(["default", "t2"])))
    except InvalidScope:
        return Scope("a")


@settings(max_examples=60, deadline=None)
@given(owners=st.lists(scopes(), min_size=1, max_size=8), query=scopes())
def test_every_path_reaches_what_the_scope_covers_and_nothing_else(
    owners: list[Scope], query: Scope, tmp_path_factory: pytest.TempPathFactory
) -> None:
    catalog = Catalog(tmp_path_factory.mktemp("scopes") / "catalog.sqlite3", 5)
    facts = catalog.add_facts([(fact_of(f"fact {i}", owner), VECTOR) for i, owner in enumerate(owners)])
    add_turns(catalog, owners[-1], [Turn("x", "said")])
    ids = [fact.id for fact in facts]
    seen = [fact for fact in facts if query.covers(fact.scope)]
    unseen = [fact for fact in facts if not query.covers(fact.scope)]

    assert catalog.list(query) == seen
    assert catalog.list(query, limit=2) == seen[:2]
    assert set(catalog.matching_scopes(query)) == {fact.scope.id for fact in seen}
    assert catalog.get_many(ids, within=query) == [fact if fact in seen else None for fact in facts]
    tenants = [fact.id for fact in facts if fact.scope.tenant == query.tenant]
    assert [fact.id for fact in facts if catalog.history(fact.id, query.tenant)] == tenants
    assert catalog.get_many(tenants, within=query.tenant) == catalog.get_many(tenants)

    one = catalog.delete([ids[0]], within=query)
    assert [ref.fact for ref in one.deleted] == [fact.id for fact in seen if fact.id == ids[0]]
    rest = catalog.delete_scope(query)
    assert [ref.fact for ref in rest.deleted] == [fact.id for fact in seen if fact.id != ids[0]]
    assert _living(catalog, facts) == unseen
    assert catalog.matching_scopes(query) == ()
    catalog.close()


def _living(catalog: Catalog, facts: list[Fact]) -> list[Fact]:
    return [fact for fact in catalog.get_many([fact.id for fact in facts]) if fact is not None]
