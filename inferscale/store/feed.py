"""The change feed: how a process learns what others put and deleted, without asking for everything."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Literal

from inferscale.core import FactId, ScopeId
from inferscale.store.records import RELOAD, Change, FactRef, Reload
from inferscale.store.sqlite import Database

KEEP_CHANGES = 10_000  # newest rows that stay; a reader further behind reloads


class ChangeFeed:
    """Reader's side; a mixin of `Catalog`. Writers call `announce` in their own transaction."""

    _db: Database

    def data_version(self) -> int:
        """Changes when another process (or another `Catalog`) committed; costs microseconds.

        Writes through this same `Catalog` do not change it.
        """
        return self._db.data_version()

    def revision(self) -> int:
        """The newest change; where a reader starts that is about to load everything."""
        with self._db.read() as db:
            return _revision(db)

    def changes_since(self, rev: int) -> tuple[int, list[Change] | Reload]:
        """The new revision and, oldest first, what happened after `rev` (this catalog's own writes too).

        RELOAD instead of a list means that `rev` is older than the feed reaches, or of another catalog:
        the reader must load everything anew.
        """
        with self._db.snapshot() as db:
            newest = _revision(db)
            oldest = db.execute("SELECT min(rev) FROM changes").fetchone()[0] or newest + 1
            if not oldest - 1 <= rev <= newest:
                return newest, RELOAD
            rows = db.execute("SELECT op, scope, fact_id FROM changes WHERE rev > ? ORDER BY rev", (rev,)).fetchall()
        return newest, [Change(*row) for row in rows]


def announce(db: sqlite3.Connection, op: Literal["put", "delete"], facts: Iterable[FactRef]) -> None:
    """Append to the feed, within the writer's transaction, and drop its oldest rows."""
    db.executemany("INSERT INTO changes (op, scope, fact_id) VALUES (?, ?, ?)", [(op, *ref) for ref in facts])
    db.execute("DELETE FROM changes WHERE rev <= ?", (_revision(db) - KEEP_CHANGES,))


def announce_reset(db: sqlite3.Connection) -> None:
    """Make every reader reload: the feed moves on by one change that it no longer holds."""
    announce(db, "delete", [FactRef(ScopeId(""), FactId(""))])
    db.execute("DELETE FROM changes")


def _revision(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'changes'").fetchone()
    return int(row[0]) if row else 0
