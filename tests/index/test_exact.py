"""The exact index answers as the naive one does, for every history of calls."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from inferscale.core import FactId, ScopeId
from inferscale.errors import InvalidInput, StoreMismatch
from inferscale.index import create_index, exact, scan
from inferscale.index.base import VectorIndex, unit_rows
from inferscale.index.exact import ExactIndex
from inferscale.index.naive import NaiveIndex

DIM = 5
SCOPES = [ScopeId(name) for name in ("a", "b", "c")]
FACTS = [FactId(f"f{i}") for i in range(12)]
# few small integers: ties, repeated directions and zero vectors are common
vectors = st.lists(st.integers(-2, 2), min_size=DIM, max_size=DIM).map(lambda v: np.array(v, dtype=np.float32))


def ids(count: int) -> list[FactId]:
    return [FactId(f"{i:05d}") for i in range(count)]


def both(dim: int) -> tuple[ExactIndex, NaiveIndex]:
    return ExactIndex(dim), NaiveIndex(dim)


def assert_same(got: list[tuple[FactId, float]], want: list[tuple[FactId, float]]) -> None:
    """Same facts in the same order; scores equal but for the last bit of float64 sums."""
    assert [fact for fact, _ in got] == [fact for fact, _ in want]
    np.testing.assert_allclose([s for _, s in got], [s for _, s in want], atol=2e-7)


class IndexMachine(RuleBasedStateMachine):
    """Random put, upsert, remove and search; `small` decides which segments are searched together."""

    small = exact.SMALL

    def __init__(self) -> None:
        super().__init__()
        self.real, self.oracle = both(DIM)
        self.kept, exact.SMALL = exact.SMALL, self.small

    def teardown(self) -> None:
        exact.SMALL = self.kept

    @rule(scope=st.sampled_from(SCOPES), rows=st.lists(st.tuples(st.sampled_from(FACTS), vectors), max_size=12))
    def put(self, scope: ScopeId, rows: list[tuple[FactId, np.ndarray]]) -> None:
        block = np.stack([v for _, v in rows]) if rows else np.zeros((0, DIM))
        for index in (self.real, self.oracle):
            index.put(scope, [fact for fact, _ in rows], block)

    @rule(scope=st.sampled_from(SCOPES), facts=st.lists(st.sampled_from(FACTS), max_size=8))
    def remove(self, scope: ScopeId, facts: list[FactId]) -> None:
        assert self.real.remove(scope, facts) == self.oracle.remove(scope, facts)

    @rule(scope=st.sampled_from(SCOPES))
    def drop_scope(self, scope: ScopeId) -> None:
        assert self.real.drop_scope(scope) == self.oracle.drop_scope(scope)

    @rule(
        scopes=st.lists(st.sampled_from([*SCOPES, ScopeId("unknown")]), max_size=5), query=vectors, k=st.integers(0, 40)
    )
    def search(self, scopes: list[ScopeId], query: np.ndarray, k: int) -> None:
        assert_same(self.real.search(scopes, query, k), self.oracle.search(scopes, query, k))

    @rule(scope=st.sampled_from(SCOPES), facts=st.lists(st.sampled_from(FACTS), max_size=6), k=st.integers(0, 14))
    def similar(self, scope: ScopeId, facts: list[FactId], k: int) -> None:
        got, want = self.real.similar(scope, facts, k), self.oracle.similar(scope, facts, k)
        assert len(got) == len(facts)
        for mine, theirs in zip(got, want, strict=True):
            assert_same(mine, theirs)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.real) == len(self.oracle)
        assert [self.real.count(s) for s in SCOPES] == [self.oracle.count(s) for s in SCOPES]


class ApartMachine(IndexMachine):
    small = 0  # every segment is searched by itself


TestJoinedScan = IndexMachine.TestCase
TestApartScan = ApartMachine.TestCase
for case in (TestJoinedScan, TestApartScan):
    case.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.3, 3.0])
def test_recall_is_exact_on_clusters_of_any_tightness(coded: bool, spread: float) -> None:
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((6, 48))[rng.integers(0, 6, 1500)] + spread * rng.standard_normal((1500, 48))
    real, oracle = both(48)
    real._coded = coded
    for index in (real, oracle):
        index.put(SCOPES[0], ids(1500), rows)
    for query in rows[:4] + 0.1 * rng.standard_normal((4, 48)):
        assert_same(real.search(SCOPES[:1], query, 50), oracle.search(SCOPES[:1], query, 50))


@pytest.mark.parametrize("kind", ["gauss", "spike", "tiny", "zero"])
def test_scores_of_both_scans_stay_within_their_bounds(kind: str) -> None:
    rows = np.random.default_rng(2).standard_normal((400, 96))
    if kind == "spike":  # one large coordinate makes the codes of all others coarse
        rows[:, 0] += 200
    if kind == "tiny":
        rows[:, 1:] *= 1e-20
    if kind == "zero":
        rows[::2] = 0
    unit = torch.from_numpy(unit_rows(rows, 400, 96))
    for query in unit[:20, None]:
        true = (unit.double() @ query[0].double())[None]
        for scores, bound in (scan.scan_codes(*scan.quantise(unit), query), scan.scan_rows(unit, query)):
            assert (scores.double() - true).abs().max() <= bound


def test_ties_are_ordered_by_id_whatever_the_order_of_puts() -> None:
    row = np.random.default_rng(3).standard_normal(DIM)
    names = ids(30)
    answers = []
    for seed in range(3):
        index = ExactIndex(DIM)
        for i in np.random.default_rng(seed).permutation(30):
            index.put(SCOPES[0], [names[i]], row[None] * (i + 1))  # the length of a vector does not matter
        answers.append([fact for fact, _ in index.search(SCOPES[:1], row, 10)])
    assert answers == [names[:10]] * 3


def test_many_small_scopes_and_a_large_one_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "SMALL", 50)
    monkeypatch.setattr(exact, "TOGETHER_ROWS", 64)
    rng = np.random.default_rng(4)
    real, oracle = both(16)
    scopes = [ScopeId(f"s{i}") for i in range(20)]
    for i, scope in enumerate(scopes):
        count = 200 if i == 7 else 10
        rows = rng.standard_normal((count, 16))
        for index in (real, oracle):
            index.put(scope, [FactId(f"{scope}-{j:03d}") for j in range(count)], rows)
    query = rng.standard_normal(16)
    assert_same(real.search(scopes, query, 30), oracle.search(scopes, query, 30))
    assert {f.split("-")[0] for f, _ in real.search(scopes[:3], query, 100)} == {"s0", "s1", "s2"}


def test_similar_agrees_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "SIMILAR_SCORES", 700)  # three facts a block
    rows = np.random.default_rng(5).standard_normal((200, 24))
    real, oracle = both(24)
    for index in (real, oracle):
        index.put(SCOPES[0], ids(200), rows)
    asked = [*ids(50), FactId("unknown"), ids(1)[0]]
    for got, want in zip(real.similar(SCOPES[0], asked, 5), oracle.similar(SCOPES[0], asked, 5), strict=True):
        assert_same(got, want)
    assert real.similar(ScopeId("unknown"), asked, 5) == [[]] * len(asked)


@pytest.mark.parametrize("index", [ExactIndex(DIM), NaiveIndex(DIM)], ids=["exact", "naive"])
def test_values_that_cannot_be_used_are_refused_and_nothing_is_kept(index: VectorIndex) -> None:
    good = np.ones((2, DIM))
    for bad in (np.nan, np.inf, -np.inf):
        rows = good.copy()
        rows[1, 2] = bad
        with pytest.raises(InvalidInput, match="vector 1"):
            index.put(SCOPES[0], FACTS[:2], rows)
        with pytest.raises(InvalidInput):
            index.search(SCOPES, rows[1], 3)
    with pytest.raises(InvalidInput, match="shape"):
        index.put(SCOPES[0], FACTS[:3], good)
    with pytest.raises(InvalidInput, match="numbers"):
        index.put(SCOPES[0], FACTS[:2], np.full((2, DIM), "x"))
    with pytest.raises(StoreMismatch, match="5 numbers and was given 6"):
        index.put(SCOPES[0], FACTS[:1], np.ones((1, DIM + 1)))
    with pytest.raises(StoreMismatch):
        index.search(SCOPES, np.ones(DIM + 1), 3)
    with pytest.raises(InvalidInput, match="k counts"):
        index.search(SCOPES, np.ones(DIM), -1)
    assert len(index) == 0


def test_extreme_lengths_neither_overflow_nor_vanish() -> None:
    index = ExactIndex(DIM)
    direction = np.array([1.0, 2.0, 0.0, -1.0, 0.5])
    index.put(SCOPES[0], FACTS[:4], np.stack([direction * 1e300, direction * 1e-300, -direction, direction * 0]))
    scores = dict(index.search(SCOPES[:1], direction * 1e200, 4))
    assert [scores[f] for f in FACTS[:4]] == pytest.approx([1, 1, -1, 0], abs=1e-6)


def test_a_removed_vector_leaves_no_numbers_behind() -> None:
    index = ExactIndex(DIM)
    index.put(SCOPES[0], FACTS, np.random.default_rng(6).standard_normal((12, DIM)))
    assert index.remove(SCOPES[0], FACTS[1:]) == 11
    segment = index._segments[SCOPES[0]]
    assert not any(tensor[1:].any() for tensor in segment._tensors())
    assert len(segment._rows) == 8  # and the memory went back
    assert index.remove(SCOPES[0], FACTS) == 1
    assert SCOPES[0] not in index._segments


def test_capacity_grows_by_doubling_and_shrinks() -> None:
    index = ExactIndex(DIM)
    rng = np.random.default_rng(7)
    for fact in ids(100):
        index.put(SCOPES[0], [fact], rng.standard_normal((1, DIM)))
    assert len(index._segments[SCOPES[0]]._rows) == 128
    for fact in ids(100)[10:]:
        index.remove(SCOPES[0], [fact])
    assert len(index._segments[SCOPES[0]]._rows) <= 32


def test_clear_and_factory() -> None:
    index = create_index(DIM)
    index.put(SCOPES[0], FACTS[:1], np.ones((1, DIM)))
    index.clear()
    assert len(index) == 0
    assert index.search(SCOPES, np.ones(DIM), 3) == []
    with pytest.raises(InvalidInput):
        create_index(0)


def test_threads_that_write_and_search_see_whole_calls() -> None:
    index = ExactIndex(DIM)
    rng = np.random.default_rng(8)
    pairs = [(FactId(f"x{i}"), FactId(f"y{i}")) for i in range(20)]
    rows = rng.standard_normal((2, DIM))
    errors: list[BaseException] = []

    def write(own: list[tuple[FactId, FactId]]) -> None:
        for _ in range(15):
            for pair in own:
                index.put(SCOPES[0], pair, rows)
            for pair in own:
                index.remove(SCOPES[0], pair)

    def read() -> None:
        for _ in range(60):
            found = {fact for fact, _ in index.search(SCOPES[:1], rows[0], 100)}
            assert all((x in found) == (y in found) for x, y in pairs)
            index.similar(SCOPES[0], [pairs[0][0]], 3)

    def guarded(work: object, *args: object) -> None:
        try:
            work(*args)  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(write, pairs[i::3])) for i in range(3)]
    threads += [threading.Thread(target=guarded, args=(read,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len(index) == 0
