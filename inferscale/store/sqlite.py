"""One SQLite connection under one lock: bounded waits, our own errors, and a WAL that forgets.

One connection rather than one per thread: threads come and go without leaking connections, no idle
reader of this process can hold back the truncation of the WAL, and SQLite has a single writer anyway.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Lock

from inferscale.errors import InvalidInput, StoreBusy, StoreDamaged, StoreError, StoreFull
from inferscale.store.residue import PAGE_BYTES, has_residue

SCRUB_WAIT = 0.5  # most seconds that a deletion waits for other processes' readers of the WAL
RETRY_EVERY = 0.01  # seconds, where SQLite reports busy without waiting by itself
FULL_BELOW = 256 * 1024  # free bytes under which an I/O error means a full disk


class Database:
    """Thread-safe; any number of processes may open the same file. Not to be used across a fork."""

    def __init__(self, path: Path, busy_timeout: float) -> None:
        """`busy_timeout` in seconds bounds every wait, for other threads and for other processes."""
        self._path = Path(path)
        self._timeout = busy_timeout
        self._lock = Lock()
        self._pid = os.getpid()
        self._unscrubbed = False
        with self._translated():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Text is private: the file is made readable by its owner alone, and SQLite copies that to its WAL.
            # Never open it when it exists: closing the descriptor would drop the locks of this process's others.
            with suppress(FileExistsError):
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            self._connection = sqlite3.connect(
                self._path, timeout=busy_timeout, isolation_level=None, check_same_thread=False
            )
        try:
            with self._translated():
                self._configure()
        except BaseException:
            self._connection.close()
            raise

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one or more queries that need not see the same snapshot."""
        with self._held(), self._translated():
            yield self._connection

    def snapshot(self) -> AbstractContextManager[sqlite3.Connection]:
        """The connection, for queries that must see the same state; writers go on meanwhile."""
        return self._transaction("BEGIN")

    def write(self) -> AbstractContextManager[sqlite3.Connection]:
        """One transaction: committed when the block ends, undone entirely when it raises."""
        return self._transaction("BEGIN IMMEDIATE")

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._held(), self._translated():
            self._connection.execute(begin)
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite undoes some failures by itself
                    self._connection.execute("ROLLBACK")
                raise

    def data_version(self) -> int:
        """Changes whenever another connection has committed; costs microseconds."""
        with self.read() as db:
            return int(db.execute("PRAGMA data_version").fetchone()[0])

    def scrub(self) -> bool:
        """Take the bytes of deleted rows out of the database and its WAL; True if none are left.

        Deleted rows are overwritten with zeros where they lie (`secure_delete`). What that leaves: old
        copies of rows that had moved, removed here by VACUUM when there are any (see `residue`), and
        pages as they were in the WAL, which is moved into the database and truncated. Another process
        that reads or writes just then can hold this back, and so can a full disk: then the next `scrub`
        or `close` tries again.
        """
        self._unscrubbed = True
        with self._held():
            return self._scrub()

    def scrub_if_due(self) -> bool:
        """Try again if an earlier `scrub` was held back; True if nothing deleted is left in the WAL."""
        return not self._unscrubbed or self.scrub()

    def close(self) -> None:
        """Idempotent; in a forked child it does nothing, for the connection is the parent's."""
        if self._pid != os.getpid():
            return
        with self._held():
            if self._unscrubbed:
                self._scrub()
            self._connection.close()

    def _scrub(self) -> bool:
        db = self._connection
        with suppress(sqlite3.Error):  # the deletion itself is committed; a full disk or a reader only delays this
            db.execute(f"PRAGMA busy_timeout = {int(min(SCRUB_WAIT, self._timeout) * 1000)}")
            try:
                if has_residue(db.serialize()):
                    db.execute("VACUUM")
                self._unscrubbed = bool(db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
            finally:
                db.execute(f"PRAGMA busy_timeout = {int(self._timeout * 1000)}")
        return not self._unscrubbed

    def _configure(self) -> None:
        db = self._connection
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # takes effect in a new file
        mode = self._retry_busy("PRAGMA journal_mode = WAL")
        if mode != "wal":
            raise StoreError(f"{self._path} is on a file system without shared memory; put it on a local disk.")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA temp_store = MEMORY")  # sorting and VACUUM must not write text outside the store

    def _retry_busy(self, statement: str) -> str:
        """Run a statement for which SQLite's own busy handler does not wait."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return str(self._connection.execute(statement).fetchone()[0])
            except sqlite3.OperationalError as error:
                if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(RETRY_EVERY)

    @contextmanager
    def _held(self) -> Iterator[None]:
        if self._pid != os.getpid():
            raise StoreError("The catalog was opened before a fork; open the store again in the child process.")
        if not self._lock.acquire(timeout=self._timeout):
            raise StoreBusy(f"Another thread held the catalog for over {self._timeout} s; try again.")
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except UnicodeEncodeError:
            raise InvalidInput("A value is not valid Unicode; pass text without lone surrogates.") from None
        except (sqlite3.Error, OSError) as error:
            raise self._translate(error) from error

    def _translate(self, error: sqlite3.Error | OSError) -> StoreError:
        code = _code(error)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreBusy(f"Another process held {self._path} for over {self._timeout} s; try again.")
        if code == sqlite3.SQLITE_FULL or (code in (None, sqlite3.SQLITE_IOERR) and self._disk_is_full()):
            return StoreFull(f"The disk of {self._path} is full; nothing was saved: free space and try again.")
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return StoreDamaged(f"{self._path} is not a readable catalog ({error}); restore it from a backup.")
        return StoreError(f"The catalog {self._path} failed: {error}.")

    def _disk_is_full(self) -> bool:
        try:
            return shutil.disk_usage(self._path.parent).free < FULL_BELOW
        except OSError:
            return False


def _code(error: Exception) -> int | None:
    """The primary SQLite result code, or None if the error did not come from SQLite's core."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
