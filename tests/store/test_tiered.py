"""A deletion that races a read or a write wins, deterministically: the race is staged inside the slow tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from inferscale.core import ChunkKey, ChunkKV
from inferscale.errors import StoreFull
from inferscale.store import RamStore, TieredStore
from tests.store.helpers import ALICE, item, same


class Interrupted(RamStore):
    """A slow tier in which something else happens at the end of a read or a write."""

    def __init__(self) -> None:
        super().__init__(10**9)
        self.meanwhile: Callable[[], None] = lambda: None

    def get_many(self, keys: Sequence[ChunkKey]) -> list[ChunkKV | None]:
        found = super().get_many(keys)
        self.meanwhile()
        return found

    def put_many(self, items: Iterable[tuple[ChunkKey, ChunkKV]]) -> None:
        super().put_many(items)
        self.meanwhile()


@pytest.mark.parametrize("remove", ["delete", "delete_scope", "discard", "clear", "invalidate"])
@pytest.mark.parametrize("racing", ["get", "put"])
def test_a_racing_call_does_not_bring_back_what_was_removed(racing: str, remove: str) -> None:
    fast, slow = RamStore(10**9), Interrupted()
    tiers = TieredStore(fast, slow)
    key, kv = item("f")
    slow.put_many([(key, kv)])
    removals: dict[str, Callable[[], None]] = {
        "delete": lambda: tiers.delete(ALICE.id, key.fact),
        "delete_scope": lambda: tiers.delete_scope(ALICE.id),
        "discard": lambda: tiers.discard([key]),
        "clear": tiers.clear,
        "invalidate": lambda: tiers.invalidate(ALICE.id, key.fact),
    }
    slow.meanwhile = removals[remove]
    if racing == "get":
        tiers.get_many([key])
    else:
        tiers.put_many([(key, kv)])
    assert not fast.contains(key)
    assert slow.contains(key) == (remove == "invalidate")


def test_a_late_promotion_does_not_replace_a_newer_chunk() -> None:
    fast, slow = RamStore(10**9), Interrupted()
    tiers = TieredStore(fast, slow)
    key, old = item("f", seed=1)
    _, new = item("f", seed=2)
    slow.put_many([(key, old)])

    def replace() -> None:
        slow.meanwhile = lambda: None
        tiers.put_many([(key, new)])

    slow.meanwhile = replace
    tiers.get_many([key])
    assert same(fast.get_many([key])[0], new)


def test_what_the_slow_tier_refused_is_not_served_from_the_fast_one() -> None:
    fast, slow = RamStore(10**9), Interrupted()
    tiers = TieredStore(fast, slow)

    def full() -> None:
        raise StoreFull("full")

    slow.meanwhile = full
    with pytest.raises(StoreFull):
        tiers.put_many([item("f")])
    assert list(fast.keys()) == []


def test_a_fast_hit_counts_as_use_in_the_slow_tier() -> None:
    touched: list[ChunkKey] = []

    class Watched(RamStore):
        def touch(self, keys: Iterable[ChunkKey]) -> None:
            touched.extend(keys)

    tiers = TieredStore(RamStore(10**9), Watched(10**9))
    key, kv = item("f")
    tiers.put_many([(key, kv)])
    tiers.get_many([key])
    assert touched == [key]
