"""The catalog: the truth for text, owners, metadata, embeddings and history, in one SQLite file.

KV can always be made again from what is here; nothing here can be made again from KV (invariant 1).
"""

from __future__ import annotations

from pathlib import Path

from inferscale.store.derivations import DerivationTable
from inferscale.store.facts import FactTable
from inferscale.store.feed import ChangeFeed
from inferscale.store.schema import prepare
from inferscale.store.sqlite import Database
from inferscale.store.turns import TurnTable


class Catalog(FactTable, TurnTable, DerivationTable, ChangeFeed):
    """Thread-safe; any number of processes may open the same file. Not to be used across a fork.

    Every method is one transaction: after it returns the change is on disk (`synchronous=FULL`), and
    if it raises nothing was changed. Every method may raise StoreBusy (another process held the file
    for `busy_timeout` seconds), StoreFull (the disk is full; free space and call again) and
    StoreDamaged. Values are parameters everywhere, never SQL text.
    """

    def __init__(self, path: Path, busy_timeout: float) -> None:
        """Open or make the catalog at `path`. Raises StoreMismatch if a newer version made it."""
        self._db = Database(path, busy_timeout)
        try:
            prepare(self._db)
            self._db.scrub()  # a process may have been killed after a deletion and before its scrub
        except BaseException:
            self._db.close()
            raise

    def meta_get(self, key: str) -> str | None:
        """A setting that belongs to the store as a whole, such as the embedder's name."""
        with self._db.read() as db:
            row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def scrub(self) -> bool:
        """Finish a deletion whose bytes a reader in another process kept in the WAL; False if it still does."""
        return self._db.scrub_if_due()

    def close(self) -> None:
        """Idempotent; the catalog is not used afterwards."""
        self._db.close()
