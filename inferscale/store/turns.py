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

    def turns(self, scope: Scope) -> list[Turn]:
        """All turns of exactly this scope, oldest first."""
        with self._db.read() as db:
            rows = db.execute("SELECT id, speaker, text, time FROM turns WHERE scope = ? ORDER BY seq", (scope.id,))
            return [turn_from_row(row) for row in rows]


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
