"""The catalog's turns: what was said, in order."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from uuid import uuid4

from inferscale.core import Scope, Turn, TurnId
from inferscale.store.records import register_scope, require_id, turn_from_row
from inferscale.store.sqlite import Database


class TurnTable:
    """A mixin of `Catalog`."""

    _db: Database

    def add_turns(self, scope: Scope, turns: Sequence[Turn]) -> list[Turn]:
        """Append turns to a scope in one transaction; returns them with ids (a turn without one gets a UUID)."""
        named = name_turns(turns)
        if named:
            with self._db.write() as db:
                insert_turns(db, scope, named)
        return named

    def turns(self, scope: Scope) -> list[Turn]:
        """All turns of exactly this scope, oldest first."""
        with self._db.read() as db:
            rows = db.execute("SELECT id, speaker, text, time FROM turns WHERE scope = ? ORDER BY seq", (scope.id,))
            return [turn_from_row(row) for row in rows]

    def turns_before(self, scope: Scope, turn_id: TurnId, n: int) -> list[Turn]:
        """The last `n` turns before `turn_id` in exactly this scope, oldest first; none for an unknown turn."""
        with self._db.read() as db:
            rows = db.execute(
                """SELECT id, speaker, text, time FROM turns WHERE scope = ?1
                   AND seq < (SELECT seq FROM turns WHERE id = ?2 AND scope = ?1) ORDER BY seq DESC LIMIT ?3""",
                (scope.id, turn_id, max(n, 0)),
            ).fetchall()
        return [turn_from_row(row) for row in reversed(rows)]


def name_turns(turns: Sequence[Turn]) -> list[Turn]:
    """The turns, each with an id; raises InvalidInput for an id that cannot be stored."""
    named = [turn if turn.id else replace(turn, id=TurnId(str(uuid4()))) for turn in turns]
    for turn in named:
        require_id(turn.id or "", "turn")
    return named


def insert_turns(db: sqlite3.Connection, scope: Scope, turns: Sequence[Turn]) -> None:
    """Append turns that have ids, within the caller's transaction."""
    register_scope(db, scope)
    db.executemany(
        "INSERT INTO turns (id, scope, speaker, text, time) VALUES (?, ?, ?, ?, ?)",
        [(turn.id, scope.id, turn.speaker, turn.text, turn.time) for turn in turns],
    )
