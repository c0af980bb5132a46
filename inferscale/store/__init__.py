"""KEEP THE BYTES: text and embeddings in a catalog, KV in tiers. See docs/design/store.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inferscale.config import StoreConfig
from inferscale.core import ChunkKey
from inferscale.store.base import KVStore, StoreUsage
from inferscale.store.catalog import Catalog
from inferscale.store.disk import DiskStore
from inferscale.store.ram import RamStore
from inferscale.store.records import RELOAD, Change, DeleteResult, FactRef, HistoryEntry, text_hash
from inferscale.store.tiered import TieredStore

__all__ = [
    "RELOAD",
    "Catalog",
    "Change",
    "DeleteResult",
    "DiskStore",
    "FactRef",
    "HistoryEntry",
    "KVStore",
    "RamStore",
    "Store",
    "StoreUsage",
    "TieredStore",
    "open_store",
    "text_hash",
]


@dataclass(frozen=True, slots=True)
class Store:
    """Both halves of one data directory."""

    catalog: Catalog
    chunks: TieredStore

    def close(self) -> None:
        """Idempotent."""
        self.chunks.close()
        self.catalog.close()


def open_store(path: Path, config: StoreConfig, on_corrupt: Callable[[ChunkKey], None] | None = None) -> Store:
    """Open or make the data directory `path`: catalog.sqlite3, and kv/ with one file per chunk.

    `on_corrupt` is called, on the thread that read it, with the key of a chunk whose file was damaged
    and has been removed. Raises StoreError and its kinds.
    """
    catalog = Catalog(path / "catalog.sqlite3", config.busy_timeout)
    try:
        disk = DiskStore(path / "kv", config.disk_bytes, on_corrupt)
    except BaseException:
        catalog.close()
        raise
    return Store(catalog, TieredStore(RamStore(config.ram_bytes), disk))
