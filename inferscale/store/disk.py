"""The disk tier: one immutable safetensors file per chunk, shared by any number of processes."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from threading import Lock
from time import time_ns
from weakref import WeakSet

from inferscale.core import ChunkKey, ChunkKV, FactId, RecipeId, ScopeId
from inferscale.errors import StoreError, StoreFull
from inferscale.store.base import KVStore, StoreUsage, check_item
from inferscale.store.format import (
    HEADER_BYTES,
    DamagedChunk,
    pack,
    parse_key,
    read_geometry,
    relative_path,
    safe_name,
    scope_path,
    unpack,
)
from inferscale.store.workspace import Workspace

logger = logging.getLogger("inferscale.store")

WRITE_BATCH = 64  # files written before their folders are synced once
MAP_ABOVE = 128 * 1024  # bytes; copying a smaller file costs less than mapping it
MAX_MAPPINGS = 16_384  # a quarter of Linux's default vm.max_map_count; beyond it files are copied
MAX_ATTEMPTS = 8  # times a folder is made anew while another process removes it
RECENCY_NS = 3600 * 10**9  # a file's mtime records its use at most once in this time
EVICT_TO = 0.9  # share of the budget that an eviction leaves
SCAN_EVERY = 16  # the folder is walked each time 1/SCAN_EVERY of the budget was written

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class _File:
    key: ChunkKey
    bytes: int
    used_ns: int


class DiskStore(KVStore):
    """Chunks below `root`, at <recipe>/<scope[:2]>/<scope>/<fact>.<tokens>.safetensors.

    Files never change: they appear by an atomic rename after their bytes were synced, and go by unlink.
    So processes need no lock between them, and a file that vanished is a miss. Tensors returned by
    `get_many` are the file's pages, mapped privately. A damaged file is removed, logged once and
    reported to `on_corrupt` (on the reading thread), so that the caller can encode the fact again.

    The budget counts file bytes of all processes together; each may overshoot it by 1/16 between walks.
    """

    def __init__(self, root: Path, budget_bytes: int, on_corrupt: Callable[[ChunkKey], None] | None = None) -> None:
        self._root = Path(root)
        self._budget = budget_bytes
        self._on_corrupt = on_corrupt
        self._mappings: WeakSet[mmap] = WeakSet()
        self._evicting = Lock()  # held while the folder is walked; nobody waits for it
        self._lock = Lock()  # guards the accounting below, never held during I/O
        self._used: dict[ChunkKey, int] = {}
        self._bytes_at_scan: int | None = None
        self._written = 0
        self._warned_missing = False
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._workspace = Workspace(self._root)
        except OSError as error:
            raise _translate(error, f"Cannot open the KV folder {self._root}") from error

    @property
    def folder(self) -> Path:
        return self._root

    # --- writing ---

    def put_many(self, items: Iterable[tuple[ChunkKey, ChunkKV]]) -> None:
        iterator = iter(items)
        while batch := list(islice(iterator, WRITE_BATCH)):
            try:
                self._account(self._publish([(key, check_item(key, kv)) for key, kv in batch]))
            except OSError as error:
                raise _translate(error, f"Cannot write KV to {self._root}") from error

    def _publish(self, batch: list[tuple[ChunkKey, ChunkKV]]) -> int:
        """Write, sync, rename, sync the folders; returns the bytes added."""
        pending: list[tuple[ChunkKey, str]] = []
        descriptors: list[int] = []
        total = 0
        try:
            for key, kv in batch:
                parts, size = pack(key, kv)
                if size > self._budget:
                    continue
                pending.append((key, self._workspace.new_path()))
                descriptors.append(os.open(pending[-1][1], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                _write_all(descriptors[-1], parts)
                total += size
            for descriptor in descriptors:  # after all writes, so that the kernel flushes them together
                os.fsync(descriptor)
            folders: set[str] = set()
            while pending:
                key, temporary = pending[-1]
                folders |= self._rename(temporary, f"{self._root}/{relative_path(key)}")
                pending.pop()
            for folder in sorted(folders, reverse=True):
                _sync_folder(folder)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            for _, temporary in pending:
                with suppress(OSError):
                    os.unlink(temporary)
        return total

    def _rename(self, temporary: str, path: str) -> set[str]:
        """Publish one file; returns the folders whose entries changed."""
        folder = Path(path).parent
        changed = {str(folder)}
        attempts = 0
        while True:
            try:
                os.rename(temporary, path)
                return changed
            except FileNotFoundError:
                attempts += 1
                if attempts > MAX_ATTEMPTS or not os.path.exists(temporary):
                    raise
            os.makedirs(folder, mode=0o700, exist_ok=True)  # another process's delete may remove it again
            changed.update(str(parent) for parent in folder.parents if parent.is_relative_to(self._root))

    # --- reading ---

    def get_many(self, keys: Sequence[ChunkKey]) -> list[ChunkKV | None]:
        found = [self._load(key) for key in keys]
        self.touch(key for key, kv in zip(keys, found, strict=True) if kv is not None)
        if any(kv is None for kv in found):
            self._warn_if_missing()
        return found

    def _load(self, key: ChunkKey) -> ChunkKV | None:
        path = f"{self._root}/{relative_path(key)}"
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("Cannot read the KV of fact %s (%s); it is served as text.", key.fact, error.strerror)
            return None
        try:
            return unpack(key, self._contents(descriptor))
        except DamagedChunk as reason:
            self._quarantine(key, path, descriptor, reason)
            return None
        except OSError as error:
            logger.warning("Cannot read the KV of fact %s (%s); it is served as text.", key.fact, error.strerror)
            return None
        finally:
            os.close(descriptor)

    def _contents(self, descriptor: int) -> mmap | bytearray:
        size = os.fstat(descriptor).st_size
        if size >= MAP_ABOVE and len(self._mappings) < MAX_MAPPINGS:
            mapping = mmap(descriptor, 0, access=ACCESS_COPY)
            self._mappings.add(mapping)
            return mapping
        with open(descriptor, "rb", closefd=False) as file:
            return bytearray(file.read())

    def _quarantine(self, key: ChunkKey, path: str, descriptor: int, reason: DamagedChunk) -> None:
        """Remove a damaged file, unless another process has already put a new one in its place."""
        logger.warning("The KV file of fact %s is damaged (%s); it was removed and is built again.", key.fact, reason)
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.unlink(path)
        if self._on_corrupt is not None:
            self._on_corrupt(key)

    def _warn_if_missing(self) -> None:
        if not self._warned_missing and not self._root.is_dir():
            self._warned_missing = True
            logger.warning("The KV folder %s is gone; facts are served as text until it is opened again.", self._root)

    def contains(self, key: ChunkKey) -> bool:
        return os.path.exists(f"{self._root}/{relative_path(key)}")

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        now = time_ns()
        unrecorded = []
        with self._lock:
            for key in keys:
                if self._used.get(key, 0) // RECENCY_NS != now // RECENCY_NS:
                    unrecorded.append(key)
                self._used[key] = now
        for key in unrecorded:
            with suppress(OSError):
                os.utime(f"{self._root}/{relative_path(key)}")

    # --- removing ---

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        folders: set[str] = set()
        for key in keys:
            path = f"{self._root}/{relative_path(key)}"
            if _unlink(path):
                folders.add(os.path.dirname(path))
        self._finish_removal(folders)

    def delete(self, scope: ScopeId, fact: FactId) -> None:
        prefix = safe_name(fact) + "."
        folders = set()
        for recipe in _listdir(self._root):
            folder = f"{self._root}/{scope_path(recipe, scope)}"
            removed = [_unlink(f"{folder}/{name}") for name in _listdir(folder) if name.startswith(prefix)]
            if any(removed):
                folders.add(folder)
        self._finish_removal(folders)

    def delete_scope(self, scope: ScopeId) -> None:
        folders = set()
        for recipe in _listdir(self._root):
            folder = f"{self._root}/{scope_path(recipe, scope)}"
            removed = [_unlink(f"{folder}/{name}") for name in _listdir(folder)]
            if any(removed):
                folders.add(folder)
        self._finish_removal(folders)

    def clear(self) -> None:
        self.discard(self.keys())

    def _finish_removal(self, folders: set[str]) -> None:
        """Make unlinks durable, and take with them what a killed writer may have left of the same chunks."""
        self._workspace.sweep()
        for folder in folders:
            try:
                _sync_folder(folder)
            except OSError as error:
                raise _translate(error, f"Cannot make the removal from {folder} durable") from error
            with suppress(OSError):  # not empty: other facts of the scope
                os.rmdir(folder)

    # --- accounting ---

    def keys(self, recipe: RecipeId | None = None) -> Iterator[ChunkKey]:
        return (file.key for file in self._scan() if recipe is None or file.key.recipe == recipe)

    def usage(self) -> StoreUsage:
        files = list(self._scan())
        token_bytes: dict[RecipeId, int] = {}
        for file in files:  # all chunks of a recipe have the same bytes per token
            if not token_bytes.get(file.key.recipe):
                token_bytes[file.key.recipe] = self._token_bytes(file.key)
        sizes = [(file.bytes - HEADER_BYTES, token_bytes[file.key.recipe]) for file in files]
        tokens = sum(size // per_token for size, per_token in sizes if per_token and size > 0)
        return StoreUsage(len(files), tokens, sum(file.bytes for file in files))

    def close(self) -> None:
        self._workspace.close()

    def _token_bytes(self, key: ChunkKey) -> int:
        try:
            with open(self._root / relative_path(key), "rb") as file:
                return read_geometry(file.read(HEADER_BYTES)).token_bytes
        except (OSError, DamagedChunk):
            return 0

    def _scan(self) -> Iterator[_File]:
        for recipe in _listdir(self._root):
            for shard in _listdir(self._root / recipe) if not recipe.startswith(".") else ():
                for scope in _listdir(self._root / recipe / shard):
                    yield from self._scan_scope(recipe, scope, self._root / recipe / shard / scope)

    def _scan_scope(self, recipe: str, scope: str, folder: Path) -> Iterator[_File]:
        for name in _listdir(folder):
            key = parse_key(recipe, scope, name)
            with suppress(FileNotFoundError):
                if key is not None:
                    status = os.stat(folder / name)
                    yield _File(key, status.st_size, max(status.st_mtime_ns, self._used.get(key, 0)))

    def _account(self, written: int) -> None:
        """Note new bytes and evict when the budget is exceeded."""
        with self._lock:
            self._written += written
            due = self._written * SCAN_EVERY > self._budget
            if self._bytes_at_scan is not None and not due and self._bytes_at_scan + self._written <= self._budget:
                return
        if self._evicting.acquire(blocking=False):
            try:
                self._evict()
            finally:
                self._evicting.release()

    def _evict(self) -> None:
        with self._lock:
            self._written = 0
        files = sorted(self._scan(), key=lambda file: file.used_ns)
        total = sum(file.bytes for file in files)
        limit = self._budget if total <= self._budget else int(self._budget * EVICT_TO)
        kept = {file.key for file in files}
        for file in files:
            if total <= limit:
                break
            _unlink(f"{self._root}/{relative_path(file.key)}")
            kept.discard(file.key)
            total -= file.bytes
        with self._lock:
            self._used = {key: used for key, used in self._used.items() if key in kept}
            self._bytes_at_scan = total


def _write_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    for part in parts:
        while part:
            part = part[os.write(descriptor, part) :]


def _sync_folder(path: str) -> None:
    """Make a folder's entries durable; one that another process's delete has removed has none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _listdir(path: Path | str) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _translate(error, f"Cannot list the KV folder {path}") from error


def _unlink(path: str) -> bool:
    """True if the file was there. Raises StoreError if it stays: a deletion that fails must be heard."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _translate(error, f"Cannot remove the KV file {path}") from error
    return True


def _translate(error: OSError, what: str) -> StoreError:
    if error.errno in _FULL:
        return StoreFull(f"{what}: the disk is full; free space and try again.")
    if error.errno == errno.ENOENT:
        return StoreError(f"{what}: the folder is gone; restore it and open the store again.")
    return StoreError(f"{what}: {error.strerror or error}.")
