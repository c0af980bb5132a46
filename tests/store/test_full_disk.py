"""A full disk: StoreFull, nothing half-visible, and the same call works once there is space."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscale.errors import StoreFull
from inferscale.store import Catalog, DiskStore
from tests.store.helpers import ALICE, VECTOR, fact_of, item, same


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """1 MiB of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(folder: Path) -> Path:
    """Take all space that is left."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                continue
    return path


def test_kv_on_a_full_disk(small_disk: Path) -> None:
    store = DiskStore(small_disk / "kv", 10**9)
    kept = item("kept", n=40)
    store.put_many([kept])
    filler = fill(small_disk)
    batch = [item(f"f{i}", n=200, seed=i) for i in range(4)]
    with pytest.raises(StoreFull, match="free space"):
        store.put_many(batch)
    assert same(store.get_many([kept[0]])[0], kept[1])
    assert list(store.keys()) == [kept[0]]
    assert not any(store._workspace._folder.iterdir())
    filler.unlink()
    store.put_many(batch)
    assert all(same(a, b) for a, (_, b) in zip(store.get_many([k for k, _ in batch]), batch, strict=True))
    store.close()


def test_the_catalog_on_a_full_disk(small_disk: Path) -> None:
    catalog = Catalog(small_disk / "catalog.sqlite3", 1)
    (kept,) = catalog.add_facts([(fact_of("kept"), VECTOR)])
    filler = fill(small_disk)
    big = [(fact_of(f"{i} " + "x" * 9000), VECTOR) for i in range(8)]
    with pytest.raises(StoreFull, match="free space"):
        catalog.add_facts(big)
    assert catalog.list(ALICE) == [kept]
    filler.unlink()
    assert len(catalog.add_facts(big)) == 8
    assert len(catalog.list(ALICE)) == 9
    catalog.close()


def test_forgetting_works_on_a_full_disk_or_says_that_it_did_not(small_disk: Path) -> None:
    catalog = Catalog(small_disk / "catalog.sqlite3", 1)
    (fact,) = catalog.add_facts([(fact_of("x" * 9000), VECTOR)])
    filler = fill(small_disk)
    try:
        catalog.delete([fact.id])
    except StoreFull:
        assert catalog.get(fact.id) == fact
    filler.unlink()
    catalog.delete([fact.id])
    assert catalog.list(ALICE) == []
    catalog.close()


def test_opening_on_a_full_disk(small_disk: Path) -> None:
    filler = fill(small_disk)
    with pytest.raises(StoreFull):
        Catalog(small_disk / "catalog.sqlite3", 1)
    filler.unlink()
    Catalog(small_disk / "catalog.sqlite3", 1).close()
