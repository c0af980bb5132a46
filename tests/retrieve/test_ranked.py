"""Retrieval: a scope is a wall, the best fact stands last, the best facts fit the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale.core import Fact, FactId, Scope, ScopeId
from inferscale.errors import InvalidInput
from inferscale.index.base import unit_rows
from inferscale.index.embed import Embedder
from inferscale.index.exact import ExactIndex
from inferscale.retrieve import create_retriever
from inferscale.retrieve.ranked import RankedRetriever

ALICE = Scope(user="alice")


class LettersEmbedder(Embedder):
    """Counts letters: nearer texts share letters, nothing has to be loaded."""

    name = "letters"

    @property
    def dim(self) -> int:
        return 26

    @property
    def fingerprint(self) -> str:
        return "0" * 32

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        counts = np.array([[t.lower().count(chr(97 + i)) for i in range(26)] for t in texts], dtype=np.float64)
        return unit_rows(counts, len(texts), 26)


@dataclass
class Shelf:
    """A catalog in a dictionary; `lies` makes it return every scope, as a faulty filter would."""

    facts: dict[FactId, Fact] = field(default_factory=dict)
    lies: bool = False

    def matching_scopes(self, scope: Scope) -> list[ScopeId]:
        return sorted({f.scope.id for f in self.facts.values() if self.lies or scope.covers(f.scope)})

    def get_many(self, ids: Sequence[FactId]) -> list[Fact | None]:
        return [self.facts.get(i) for i in ids]


def stocked(facts: Sequence[Fact]) -> tuple[RankedRetriever, Shelf]:
    embedder, shelf = LettersEmbedder(), Shelf({f.id: f for f in facts})
    index = ExactIndex(embedder.dim)
    for fact in facts:
        index.put(fact.scope.id, [fact.id], embedder.embed([fact.text]))
    retriever = create_retriever(index, shelf, embedder)
    assert isinstance(retriever, RankedRetriever)
    return retriever, shelf


def fact(name: str, text: str, scope: Scope = ALICE) -> Fact:
    return Fact(FactId(name), text, scope)


PETS = [fact("1", "aab"), fact("2", "aaab"), fact("3", "ab"), fact("4", "abb"), fact("5", "zzz")]
BY_RANK = ["2", "1", "3", "4", "5"]  # for the query "a"


def found(retriever: RankedRetriever, top_k: int, **options: object) -> list[str]:
    hits = retriever.search(retriever.embed("a"), ALICE, top_k, **options)  # type: ignore[arg-type]
    return [h.fact.id for h in hits]


@pytest.mark.parametrize("top_k", range(8))
def test_the_best_fact_stands_last(top_k: int) -> None:
    retriever, _ = stocked(PETS)
    assert found(retriever, top_k) == BY_RANK[:top_k][::-1]


def test_scores_are_cosines_and_rise() -> None:
    retriever, _ = stocked(PETS)
    hits = retriever.search(retriever.embed("a"), ALICE, 5)
    assert [h.score for h in hits] == sorted(h.score for h in hits)
    assert hits[-1].score == pytest.approx(3 / 10**0.5)


def test_a_deleted_fact_that_the_index_still_holds_is_topped_up() -> None:
    many = [fact(f"{i:03d}", "a" * (200 - i) + "b") for i in range(100)]
    retriever, shelf = stocked(many)
    for i in range(60):
        del shelf.facts[FactId(f"{i:03d}")]
    assert found(retriever, 5) == ["064", "063", "062", "061", "060"]
    assert len(found(retriever, 1000)) == 40


def test_the_same_text_comes_once_with_its_best_rank() -> None:
    copies = [fact(f"c{i:02d}", t) for i, t in enumerate(["Aaab", "aaab ", " aaab", "ＡAAB"] * 8)]  # noqa: RUF001
    retriever, _ = stocked([*PETS, *copies])
    assert found(retriever, 3) == ["3", "1", "2"]


def test_budget_keeps_the_best_and_ends_at_the_first_that_does_not_fit() -> None:
    retriever, _ = stocked(PETS)
    sizes = {"2": 4, "1": 3, "3": 2, "4": 1, "5": 1}

    def within(budget: int) -> list[str]:
        return found(retriever, 5, token_budget=budget, count_tokens=lambda f: sizes[f.id])

    assert within(0) == []
    assert within(4) == ["2"]
    assert within(6) == ["2"]  # "1" does not fit, and worse facts do not take its place
    assert within(7) == ["1", "2"]
    assert within(9) == ["3", "1", "2"]
    assert within(100) == BY_RANK[::-1]


def test_a_fact_larger_than_the_whole_budget_is_passed_over() -> None:
    retriever, _ = stocked(PETS)
    assert found(retriever, 2, token_budget=10, count_tokens=lambda f: 99 if f.id == "2" else 1) == ["3", "1"]


def test_options_out_of_range_are_refused() -> None:
    retriever, _ = stocked(PETS)
    for options in ({"top_k": -1}, {"top_k": 1, "token_budget": -1}, {"top_k": 1, "token_budget": 5}):
        with pytest.raises(InvalidInput):
            found(retriever, **options)  # type: ignore[arg-type]


def test_nothing_stored_finds_nothing() -> None:
    retriever, _ = stocked([])
    assert found(retriever, 5) == []


names = st.sampled_from(["a", "b"])
maybe = st.none() | names
scopes = st.tuples(maybe, maybe, maybe, names).filter(lambda s: any(s[:3])).map(lambda s: Scope(*s))
texts = st.text("abcxyz", min_size=1, max_size=6)


@given(st.lists(st.tuples(scopes, texts), max_size=25), scopes, texts, st.integers(0, 30), st.booleans())
def test_no_fact_of_another_scope_is_ever_returned(
    stored: list[tuple[Scope, str]], scope: Scope, query: str, top_k: int, lies: bool
) -> None:
    facts = [Fact(FactId(f"{i:02d}"), text, owner) for i, (owner, text) in enumerate(stored)]
    retriever, shelf = stocked(facts)
    shelf.lies = lies  # even a catalog that forgets its filter lets nothing through
    hits = retriever.search(retriever.embed(query), scope, top_k)
    assert all(scope.covers(h.fact.scope) for h in hits)
    visible = {f.text for f in facts if scope.covers(f.scope)}
    assert len(hits) == min(top_k, len(visible))  # and nothing of its own is missing


def test_a_fact_whose_owner_changed_is_not_returned() -> None:
    retriever, shelf = stocked(PETS)
    shelf.facts[FactId("2")] = replace(PETS[1], scope=Scope(user="mallory"))
    assert found(retriever, 5) == ["5", "4", "3", "1"]
