"""What each fact's KV was computed from, so that forgetting one fact reaches the KV of others.

Companions and window turns leave traces in a fact's keys and values. Their ids are recorded before the
chunk is written and again after it; docs/design/memory.md draws how that is ordered against deletion.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from inferscale.core import FactId
from inferscale.store.feed import announce
from inferscale.store.records import FactRef, SourceKind, json_list
from inferscale.store.sqlite import Database

_MISSING_SOURCE = """
    (kind = 'fact' AND source_id NOT IN (SELECT id FROM facts))
    OR (kind = 'turn' AND source_id NOT IN (SELECT id FROM turns))
"""


class DerivationTable:
    """A mixin of `Catalog`."""

    _db: Database

    def set_derivations(
        self, fact_id: FactId, text_hash: str, sources: Iterable[tuple[str, SourceKind]], *, published: bool
    ) -> bool:
        """Record what the fact's KV is computed from.

        Before the chunk is written (`published` False) this adds to what is recorded: until then the
        old chunk may be served, and it stays if the process dies. Afterwards (True) it replaces that,
        and tells other processes that the fact has another chunk.

        `text_hash` is `records.text_hash` of the text that was encoded; each source is a fact's or a
        turn's id with its kind. Sources reached through another fact's stored KV count too. Returns
        False, and records nothing, if the fact is gone or its text is another, or if a source is gone
        or of another scope: the KV must then not be published.
        """
        rows = [(fact_id, source, kind) for source, kind in dict(sources).items()]
        with self._db.write() as db:
            fact = db.execute("SELECT scope FROM facts WHERE id = ? AND hash = ?", (fact_id, text_hash)).fetchone()
            if fact is None or not _all_exist(db, fact[0], rows):
                return False
            if published:
                db.execute("DELETE FROM derivations WHERE fact_id = ?", (fact_id,))
                announce(db, "put", [FactRef(fact[0], fact_id)])
            db.executemany("INSERT OR IGNORE INTO derivations VALUES (?, ?, ?)", rows)
        return True

    def dependents(self, source_ids: Iterable[str]) -> list[FactRef]:
        """Facts whose KV was computed from any of these facts or turns, without those facts themselves."""
        with self._db.read() as db:
            return find_dependents(db, list(source_ids))

    def sources(self, fact_ids: Iterable[FactId]) -> dict[FactId, set[str]]:
        """For each fact whose KV was published: the ids that it was computed from (none: computed alone)."""
        with self._db.read() as db:
            ids = json_list(fact_ids)
            rows = db.execute(
                "SELECT fact_id, source_id FROM derivations WHERE fact_id IN (SELECT value FROM json_each(?))", (ids,)
            ).fetchall()
        found: dict[FactId, set[str]] = {}
        for fact_id, source in rows:
            found.setdefault(fact_id, set()).add(source)
        return found

    def broken_derivations(self) -> list[FactRef]:
        """Facts whose KV was computed from something that is gone now.

        At start-up their KV is deleted: a process may have been killed between a deletion and that.
        """
        with self._db.read() as db:
            rows = db.execute(
                f"""SELECT scope, id FROM facts
                    WHERE id IN (SELECT fact_id FROM derivations WHERE {_MISSING_SOURCE}) ORDER BY seq"""
            )
            return [FactRef(*row) for row in rows]


def find_dependents(db: sqlite3.Connection, source_ids: Sequence[str]) -> list[FactRef]:
    """`DerivationTable.dependents` within a transaction."""
    rows = db.execute(
        """SELECT scope, id FROM facts
           WHERE id IN (SELECT fact_id FROM derivations WHERE source_id IN (SELECT value FROM json_each(?1)))
           AND id NOT IN (SELECT value FROM json_each(?1)) ORDER BY seq""",
        (json_list(source_ids),),
    )
    return [FactRef(*row) for row in rows]


def _all_exist(db: sqlite3.Connection, scope: str, rows: Sequence[tuple[FactId, str, SourceKind]]) -> bool:
    for table, kind in (("facts", "fact"), ("turns", "turn")):
        wanted = [source for _, source, of_kind in rows if of_kind == kind]
        (present,) = db.execute(
            f"SELECT count(*) FROM {table} WHERE scope = ? AND id IN (SELECT value FROM json_each(?))",
            (scope, json_list(wanted)),
        ).fetchone()
        if present != len(wanted):
            return False
    return True
