"""Every tier answers like a dictionary, whatever the order of calls."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from inferscale.core import ChunkKey, ChunkKV, FactId, RecipeId, ScopeId
from inferscale.errors import InvalidInput
from inferscale.store import DiskStore, KVStore, RamStore, TieredStore
from tests.store.helpers import item, key_of, kv_of, same

BIG = 10**9
FACTORIES: dict[str, Callable[[Path], KVStore]] = {
    "ram": lambda root: RamStore(BIG),
    "disk": lambda root: DiskStore(root, BIG),
    "tiered": lambda root: TieredStore(RamStore(BIG), DiskStore(root, BIG)),
    "tiered, ram for two chunks": lambda root: TieredStore(RamStore(400), DiskStore(root, BIG)),
}

SCOPES = st.sampled_from(["aa11", "aa22", "../up"])
FACTS = st.sampled_from(["f1", "f1.x", "f*", "ü/..\n"])
RECIPES = st.sampled_from(["r1", "r2"])
TOKENS = st.sampled_from([(1,), (1, 2, 3)])
KEYS = st.builds(lambda f, t, s, r: (key_of(f, t, s, r), t), FACTS, TOKENS, SCOPES, RECIPES)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


class TierMachine(RuleBasedStateMachine):
    factory: Callable[[Path], KVStore]

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = type(self).factory(Path(self.folder.name))
        self.oracle: dict[ChunkKey, ChunkKV] = {}

    @rule(keys=st.lists(KEYS, max_size=4), seed=st.integers(0, 99), dtype=DTYPES)
    def put(self, keys: list[tuple[ChunkKey, tuple[int, ...]]], seed: int, dtype: torch.dtype) -> None:
        items = [(key, kv_of(tokens, seed + i, dtype)) for i, (key, tokens) in enumerate(keys)]
        self.store.put_many(iter(items))
        self.oracle.update(items)

    @rule(keys=st.lists(KEYS, max_size=6))
    def get(self, keys: list[tuple[ChunkKey, tuple[int, ...]]]) -> None:
        wanted = [key for key, _ in keys]
        for key, kv in zip(wanted, self.store.get_many(wanted), strict=True):
            assert same(kv, self.oracle.get(key))
            assert self.store.contains(key) == (key in self.oracle)

    @rule(scope=SCOPES, fact=FACTS)
    def delete(self, scope: str, fact: str) -> None:
        self.store.delete(ScopeId(scope), FactId(fact))
        self.oracle = {k: v for k, v in self.oracle.items() if (k.scope, k.fact) != (scope, fact)}

    @rule(scope=SCOPES)
    def delete_scope(self, scope: str) -> None:
        self.store.delete_scope(ScopeId(scope))
        self.oracle = {k: v for k, v in self.oracle.items() if k.scope != scope}

    @rule(key=KEYS)
    def discard(self, key: tuple[ChunkKey, tuple[int, ...]]) -> None:
        self.store.discard([key[0]])
        self.oracle.pop(key[0], None)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.oracle.clear()

    @invariant()
    def keys_and_usage_agree(self) -> None:
        assert set(self.store.keys()) == set(self.oracle)
        for recipe in ("r1", "r2"):
            assert set(self.store.keys(RecipeId(recipe))) == {k for k in self.oracle if k.recipe == recipe}
        usage = self.store.usage()
        assert usage.chunks == len(self.oracle)

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


@pytest.mark.parametrize("name", FACTORIES)
def test_a_tier_is_a_dictionary(name: str) -> None:
    machine = type("Machine", (TierMachine,), {"factory": staticmethod(FACTORIES[name])})
    options = settings(max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=options)


@pytest.mark.parametrize("name", FACTORIES)
def test_usage_counts_tokens_and_bytes(name: str, tmp_path: Path) -> None:
    store = FACTORIES[name](tmp_path)
    assert store.usage().bytes_per_token == 0
    store.put_many([item("a", n=3), item("b", n=5)])
    usage = store.usage()
    tensors = 8 * 2 * 2 * 4 * 4  # tokens, keys and values, layers, head dim, float32
    files = 0 if name == "ram" else 2 * 1024 + 8 * 8  # headers and token ids
    assert (usage.chunks, usage.tokens, usage.bytes) == (2, 8, tensors + files)
    assert usage.bytes_per_token == usage.bytes / 8


@pytest.mark.parametrize("name", FACTORIES)
def test_a_chunk_that_is_not_what_its_key_names_is_refused(name: str, tmp_path: Path) -> None:
    store = FACTORIES[name](tmp_path)
    key = key_of("a", (1, 2))
    with pytest.raises(InvalidInput, match="tokens"):
        store.put_many([(key, kv_of((1, 3)))])
    with pytest.raises(InvalidInput, match="float32"):
        store.put_many([(key, kv_of((1, 2), dtype=torch.float64))])
    assert store.get_many([key]) == [None]


@settings(max_examples=50, deadline=None)
@given(budget=st.integers(0, 2000), sizes=st.lists(st.integers(1, 12), max_size=30))
def test_ram_never_exceeds_its_budget_and_keeps_the_latest(budget: int, sizes: list[int]) -> None:
    store = RamStore(budget)
    for i, n in enumerate(sizes):
        key, kv = item(f"f{i}", n)
        store.put_many([(key, kv)])
        assert store.usage().bytes <= budget
        assert store.contains(key) == (kv.nbytes <= budget)


def test_ram_evicts_the_least_recently_used() -> None:
    a, b, c = item("a"), item("b"), item("c")
    store = RamStore(2 * a[1].nbytes)
    store.put_many([a, b])
    store.get_many([a[0]])
    store.put_many([c])
    assert [kv is not None for kv in store.get_many([a[0], b[0], c[0]])] == [True, False, True]


def test_a_kept_slice_does_not_pin_the_pass_it_was_cut_from() -> None:
    tokens = (1, 2)
    packed = torch.randn(2, 500, 1, 4)
    store = RamStore(BIG)
    store.put_many([(key_of("a", tokens), ChunkKV(tokens, packed[:, 10:12], packed[:, 20:22]))])
    (kept,) = store.get_many([key_of("a", tokens)])
    assert kept is not None
    assert kept.keys.untyped_storage().nbytes() == kept.keys.nbytes
    assert torch.equal(kept.keys, packed[:, 10:12])
