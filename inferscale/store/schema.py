"""The catalog's tables, and the refusal of a catalog that this version cannot read."""

from __future__ import annotations

import sqlite3

from inferscale.errors import StoreDamaged, StoreMismatch
from inferscale.store.sqlite import Database

VERSION = 1

# `seq` is the order of insertion, never reused, so it orders a scope's rows as well as all rows.
# Indexes hold ids and digests of owners only, never texts or names: index pages are not scrubbed (see residue).
# derivations.source_id has no foreign key: a row whose source is gone says that KV must be dropped.
_STATEMENTS = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE scopes (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, user TEXT, agent TEXT, run TEXT,
        by_user TEXT, by_agent TEXT, by_run TEXT
    )""",
    "CREATE INDEX scopes_user ON scopes (by_user)",
    "CREATE INDEX scopes_agent ON scopes (by_agent)",
    "CREATE INDEX scopes_run ON scopes (by_run)",
    """CREATE TABLE turns (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
        scope TEXT NOT NULL REFERENCES scopes (id), speaker TEXT NOT NULL, text TEXT NOT NULL, time TEXT
    )""",
    "CREATE INDEX turns_scope ON turns (scope)",
    """CREATE TABLE facts (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
        scope TEXT NOT NULL REFERENCES scopes (id), text TEXT NOT NULL, hash TEXT NOT NULL, time TEXT,
        turn_id TEXT REFERENCES turns (id) ON DELETE SET NULL, metadata TEXT NOT NULL,
        created_at TEXT NOT NULL, updated_at TEXT NOT NULL, embedding BLOB NOT NULL
    )""",
    "CREATE INDEX facts_scope ON facts (scope)",
    "CREATE INDEX facts_turn ON facts (turn_id)",
    """CREATE TABLE history (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, memory_id TEXT NOT NULL, scope TEXT NOT NULL,
        tenant TEXT NOT NULL, old_memory TEXT, new_memory TEXT,
        event TEXT NOT NULL CHECK (event IN ('ADD', 'UPDATE', 'DELETE')),
        created_at TEXT NOT NULL, updated_at TEXT NOT NULL, is_deleted INTEGER NOT NULL
    )""",
    "CREATE INDEX history_memory ON history (memory_id)",
    "CREATE INDEX history_scope ON history (scope)",
    """CREATE TABLE fact_turns (
        fact_id TEXT NOT NULL REFERENCES facts (id) ON DELETE CASCADE,
        turn_id TEXT NOT NULL REFERENCES turns (id) ON DELETE CASCADE, PRIMARY KEY (fact_id, turn_id)
    ) WITHOUT ROWID""",
    "CREATE INDEX fact_turns_turn ON fact_turns (turn_id)",
    """CREATE TABLE derivations (
        fact_id TEXT NOT NULL REFERENCES facts (id) ON DELETE CASCADE, source_id TEXT NOT NULL,
        kind TEXT NOT NULL CHECK (kind IN ('fact', 'turn')), PRIMARY KEY (fact_id, source_id)
    ) WITHOUT ROWID""",
    "CREATE INDEX derivations_source ON derivations (source_id)",
    """CREATE TABLE changes (
        rev INTEGER PRIMARY KEY AUTOINCREMENT, scope TEXT NOT NULL, fact_id TEXT NOT NULL,
        op TEXT NOT NULL CHECK (op IN ('put', 'delete'))
    )""",
)


def prepare(database: Database) -> None:
    """Make the tables of a new catalog, or check those of an existing one.

    Raises StoreMismatch for a catalog of a newer version, StoreDamaged for a foreign SQLite file.
    """
    with database.read() as db:
        if _check(db):
            return
    with database.write() as db:
        if _check(db):  # another process made them since
            return
        for statement in _STATEMENTS:
            db.execute(statement)
        db.execute("INSERT INTO meta VALUES ('schema_version', ?)", (str(VERSION),))


def _check(db: sqlite3.Connection) -> bool:
    """True if the tables are there and readable, False if the file is new."""
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return False
    row = db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone() if "meta" in tables else None
    if row is None:
        raise StoreDamaged("The file is an SQLite database but not a catalog; choose another path.")
    if int(row[0]) != VERSION:
        raise StoreMismatch(f"The catalog has schema {row[0]} and this version reads {VERSION}; upgrade inferscale.")
    return True
