"""Files: what is written can be read by others, what is damaged is never served, what vanished is a miss."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from inferscale.core import ChunkKey
from inferscale.errors import InvalidInput, StoreError
from inferscale.store import DiskStore, disk
from inferscale.store.format import HEADER_BYTES, relative_path
from tests.store.helpers import ALICE, BOB, RECIPE, all_bytes, item, key_of, kv_of, raw, same

BIG = 10**9


@pytest.fixture(params=["copied", "mapped"])
def how_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are copied, large ones mapped: hold every property for both."""
    if request.param == "mapped":
        monkeypatch.setattr(disk, "MAP_ABOVE", 1)


def only_file(root: Path) -> Path:
    (path,) = root.rglob("*.safetensors")
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_safetensors_library_reads_what_we_write(tmp_path: Path, dtype: torch.dtype) -> None:
    tokens = (3, 1, 4, 1, 5)
    kv = kv_of(tokens, dtype=dtype)
    DiskStore(tmp_path, BIG).put_many([(key_of("f", tokens), kv)])
    path = only_file(tmp_path)
    assert path.relative_to(tmp_path) == Path(relative_path(key_of("f", tokens)))
    with safe_open(path, "pt") as file:
        assert file.metadata()["recipe"] == RECIPE
        assert file.metadata()["format"] == "inferscale.kv.1"
        assert file.get_tensor("token_ids").tolist() == list(tokens)
        assert torch.equal(file.get_tensor("keys"), kv.keys)
        assert torch.equal(file.get_tensor("values"), kv.values)


@pytest.mark.usefixtures("how_read")
def test_no_flipped_byte_is_ever_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reported: list[ChunkKey] = []
    store = DiskStore(tmp_path, BIG, reported.append)
    key, kv = item("f", n=3)
    store.put_many([(key, kv)])
    path = only_file(tmp_path)
    good = path.read_bytes()
    # All of the header's text, a sample of its padding, all token ids, a sample of the tensors.
    text_end = len(good[:HEADER_BYTES].rstrip())
    positions = [*range(text_end), *range(text_end, HEADER_BYTES, 61), *range(HEADER_BYTES, len(good), 3)]
    for count, position in enumerate(positions, start=1):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        path.write_bytes(bad)
        caplog.clear()
        assert store.get_many([key]) == [None], position
        assert reported == [key] * count
        assert len(caplog.records) == 1
        assert not path.exists()
    path.write_bytes(good)
    assert same(store.get_many([key])[0], kv)


@pytest.mark.usefixtures("how_read")
@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 9, -1])
def test_a_truncated_file_is_removed_and_reported(tmp_path: Path, keep: int) -> None:
    reported: list[ChunkKey] = []
    store = DiskStore(tmp_path, BIG, reported.append)
    key, kv = item("f")
    store.put_many([(key, kv)])
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    assert store.get_many([key]) == [None]
    assert reported == [key]
    assert not path.exists()


@pytest.mark.usefixtures("how_read")
@pytest.mark.parametrize("other", [key_of("g", (7, 8, 9)), key_of("f", (7, 8, 9), BOB.id), key_of("f", (9, 8, 7))])
def test_a_valid_file_under_another_key_is_not_served(tmp_path: Path, other: ChunkKey) -> None:
    reported: list[ChunkKey] = []
    store = DiskStore(tmp_path, BIG, reported.append)
    key, kv = item("f", n=3)
    store.put_many([(key, kv)])
    target = tmp_path / relative_path(other)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(only_file(tmp_path), target)
    assert store.get_many([other, key])[0] is None
    assert reported == [other]


def test_a_damaged_file_that_was_replaced_meanwhile_stays(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BIG)
    key, kv = item("f")
    store.put_many([(key, kv)])
    path = only_file(tmp_path)
    descriptor = os.open(path, os.O_RDONLY)
    store.put_many([(key, kv)])
    store._quarantine(key, str(path), descriptor, disk.DamagedChunk("as if"))
    os.close(descriptor)
    assert same(store.get_many([key])[0], kv)


@pytest.mark.usefixtures("how_read")
def test_a_chunk_in_hand_survives_the_removal_of_its_file(tmp_path: Path) -> None:
    store, other = DiskStore(tmp_path, BIG), DiskStore(tmp_path, BIG)
    key, kv = item("f")
    store.put_many([(key, kv)])
    (held,) = store.get_many([key])
    other.delete(key.scope, key.fact)
    assert same(held, kv)
    assert store.get_many([key]) == [None]
    assert held is not None
    assert raw(held.keys) not in all_bytes(tmp_path)


def test_writing_to_a_mapped_chunk_never_reaches_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAP_ABOVE", 1)
    store = DiskStore(tmp_path, BIG)
    key, kv = item("f")
    store.put_many([(key, kv)])
    (held,) = store.get_many([key])
    assert held is not None
    held.keys.zero_()
    assert same(store.get_many([key])[0], kv)


def test_mappings_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAP_ABOVE", 1)
    monkeypatch.setattr(disk, "MAX_MAPPINGS", 2)
    store = DiskStore(tmp_path, BIG)
    items = [item(f"f{i}", seed=i) for i in range(4)]
    store.put_many(items)
    held = store.get_many([key for key, _ in items])
    assert all(same(a, b) for a, (_, b) in zip(held, items, strict=True))
    assert len(store._mappings) == 2
    del held
    assert len(store._mappings) == 0


@settings(max_examples=60, deadline=None)
@given(fact=st.text(min_size=1, max_size=12))
def test_any_fact_id_is_a_safe_file_name(fact: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("any") / "kv"
    store = DiskStore(root, BIG)
    key, kv = item(fact)
    store.put_many([(key, kv)])
    assert only_file(root.parent).is_relative_to(root)
    assert same(store.get_many([key])[0], kv)
    assert list(store.keys()) == [key]
    store.delete(key.scope, key.fact)
    assert list(store.keys()) == []


@pytest.mark.parametrize("fact", ["", "x" * 121, "ü" * 21, "\ud800"])
def test_an_unusable_fact_id_is_refused(fact: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        DiskStore(tmp_path, BIG).delete(ALICE.id, item(fact)[0].fact)


def test_the_budget_holds_over_processes_and_the_least_recently_used_leave(tmp_path: Path) -> None:
    size = HEADER_BYTES + 3 * (64 + 8)
    items = [item(f"f{i}", n=3, seed=i) for i in range(10)]
    other = DiskStore(tmp_path, BIG)
    other.put_many(items)
    for age, (key, _) in enumerate(items):  # f0 is the oldest
        os.utime(tmp_path / relative_path(key), (1000 + age, 1000 + age))
    store = DiskStore(tmp_path, 8 * size)
    assert store.get_many([items[0][0]]) != [None]
    new = item("new", n=3)
    store.put_many([new])
    left = {file.fact for file in list(store.keys())}
    assert store.usage().bytes <= 8 * size
    assert {"f0", "f9", "new"} <= left
    assert not {"f1", "f2", "f3"} & left


def test_a_chunk_larger_than_the_budget_is_not_kept(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 100)
    store.put_many([item("f")])
    assert store.usage().chunks == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_use_is_recorded_in_the_file_once_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, kv = item("f")
    store = DiskStore(tmp_path, BIG)
    store.put_many([(key, kv)])
    path = only_file(tmp_path)
    for hour, recorded in [(1, True), (1, False), (2, True)]:
        monkeypatch.setattr(disk, "time_ns", lambda hour=hour: hour * disk.RECENCY_NS)
        os.utime(path, (1000, 1000))
        store.get_many([key])
        assert (path.stat().st_mtime > 1000) == recorded


def test_leftovers_of_ended_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    living = DiskStore(tmp_path, BIG)
    unfinished = Path(living._workspace.new_path())
    unfinished.write_bytes(b"half a chunk")
    dead = tmp_path / ".tmp" / "0123456789abcdef"
    dead.mkdir()
    (dead / "0").write_bytes(b"rubbish")
    dead.with_name(f"{dead.name}.lock").touch()  # nobody holds this lock
    opened = DiskStore(tmp_path, BIG)
    assert not dead.exists()
    assert unfinished.exists()
    opened.close()
    living.close()
    assert list((tmp_path / ".tmp").iterdir()) == []
    living.close()


def test_a_vanished_folder_is_misses_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "kv"
    store = DiskStore(root, BIG)
    key, kv = item("f")
    store.put_many([(key, kv)])
    shutil.rmtree(root)
    with caplog.at_level(logging.WARNING):
        assert store.get_many([key]) == [None]
        assert store.get_many([key]) == [None]
    assert len(caplog.records) == 1
    assert not store.contains(key)
    assert store.usage().chunks == 0
    store.delete(key.scope, key.fact)
    with pytest.raises(StoreError, match="gone"):
        store.put_many([(key, kv)])
    assert not root.exists()
    store.close()


def test_an_unusable_root_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError):
        DiskStore(tmp_path / "file", BIG)


def test_writers_and_deleters_of_one_scope_do_not_fail_each_other(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    stores = [DiskStore(tmp_path, BIG) for _ in range(4)]

    def work(store: DiskStore, name: str) -> None:
        try:
            for i in range(15):
                key, kv = item(f"{name}{i}")
                store.put_many([(key, kv)])
                found = store.get_many([key])[0]
                assert found is None or same(found, kv)
                store.delete_scope(ALICE.id)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(store, str(i))) for i, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert stores[0].usage().chunks == 0
