"""The catalog's facts: writing, changing, finding and forgetting them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from inferscale.core import Fact, FactId, Scope, ScopeId, Turn, TurnId, digest
from inferscale.errors import InvalidInput, MemoryNotFound, StoreMismatch
from inferscale.store.derivations import find_dependents
from inferscale.store.feed import announce, announce_reset
from inferscale.store.records import (
    FACT_COLUMNS,
    DeleteResult,
    Embedding,
    FactRef,
    HistoryEntry,
    Wall,
    drop_empty_scopes,
    embedding_bytes,
    facts_from_rows,
    json_list,
    metadata_json,
    now,
    register_scope,
    require_id,
    scope_filter,
    text_hash,
)
from inferscale.store.sqlite import Database
from inferscale.store.turns import insert_turns

Facts = list[Fact]
_FROM_FACTS = f"SELECT {FACT_COLUMNS} FROM facts JOIN scopes ON scopes.id = facts.scope"


class FactTable:
    """A mixin of `Catalog`.

    `within`, where a method takes it, is a wall: facts beyond it are treated as if they did not exist.
    None means no wall, for upkeep that serves everyone.
    """

    _db: Database

    # --- writing ---

    def add_facts(
        self,
        items: Sequence[tuple[Fact, Embedding]],
        turns: Sequence[Turn] = (),
        said_again: Sequence[tuple[FactId, TurnId]] = (),
    ) -> Facts:
        """Add facts with their embeddings [d] float32, all or none; returns them with their times filled in.

        `turns` (with ids, of the facts' one scope) are appended in the same transaction, so a killed
        process leaves no turn that no memory would ever delete. `said_again` names facts that are
        there already and that one of these turns repeats: deleting such a fact deletes the turn too.
        Raises InvalidInput for an id that is taken or a turn that is not in the fact's scope,
        StoreMismatch for an embedding of another dimension than the catalog's.
        """
        stamp = now()
        added = [
            replace(fact, created_at=fact.created_at or stamp, updated_at=fact.updated_at or fact.created_at or stamp)
            for fact, _ in items
        ]
        vectors = [embedding_bytes(embedding) for _, embedding in items]
        if added:
            with self._db.write() as db:
                if turns:
                    insert_turns(db, added[0].scope, turns)
                for fact, vector in zip(added, vectors, strict=True):
                    _require_dimension(db, vector)
                    _insert(db, fact, vector)
                    _record(db, fact, "ADD", None, fact.text, fact.updated_at)
                said = [(fact.id, fact.turn_id) for fact in added if fact.turn_id is not None]
                db.executemany(  # a fact that is said again may have been deleted meanwhile
                    "INSERT OR IGNORE INTO fact_turns SELECT ?1, ?2 WHERE EXISTS (SELECT 1 FROM facts WHERE id = ?1)",
                    [*said, *said_again],
                )
                announce(db, "put", [FactRef(fact.scope.id, fact.id) for fact in added])
        return added

    def update(
        self,
        fact_id: FactId,
        text: str | None = None,
        metadata: dict[str, Any] | None = None,
        embedding: Embedding | None = None,
        within: Wall = None,
    ) -> Fact:
        """Change what is given and keep the rest; the owner never changes. Returns the new fact.

        A new text needs its embedding. The KV of the old text, and of the fact's `dependents`, is the
        caller's to delete. Raises MemoryNotFound.
        """
        if text is not None and embedding is None:
            raise InvalidInput("A new text needs its embedding; pass both.")
        with self._db.write() as db:
            old = _select(db, [fact_id], within).get(fact_id)
            if old is None:
                raise MemoryNotFound(f"No memory {fact_id}; list the memories to see their ids.")
            new = replace(
                old,
                text=old.text if text is None else text,
                metadata=old.metadata if metadata is None else metadata,
                updated_at=now(),
            )
            db.execute(
                "UPDATE facts SET text = ?, hash = ?, metadata = ?, updated_at = ? WHERE id = ?",
                (new.text, text_hash(new.text), metadata_json(new.metadata), new.updated_at, fact_id),
            )
            if embedding is not None:
                vector = embedding_bytes(embedding)
                _require_dimension(db, vector)
                db.execute("UPDATE facts SET embedding = ? WHERE id = ?", (vector, fact_id))
            _record(db, new, "UPDATE", old.text, new.text, new.updated_at)
            announce(db, "put", [FactRef(new.scope.id, fact_id), *find_dependents(db, [fact_id])])
        return new

    # --- finding ---

    def get(self, fact_id: FactId, within: Wall = None) -> Fact | None:
        """One fact, or None."""
        return self.get_many([fact_id], within)[0]

    def get_many(self, fact_ids: Sequence[FactId], within: Wall = None) -> list[Fact | None]:
        """For each id, in order, its fact or None."""
        with self._db.read() as db:
            found = _select(db, fact_ids, within)
        return [found.get(fact_id) for fact_id in fact_ids]

    def list(self, scope: Scope, limit: int | None = None) -> Facts:
        """Every fact that `scope` covers, in order of insertion; `limit` keeps the first ones."""
        where, values = scope_filter(scope)
        with self._db.read() as db:
            rows = db.execute(
                f"{_FROM_FACTS} WHERE {where} ORDER BY facts.seq LIMIT ?", (*values, -1 if limit is None else limit)
            )
            return facts_from_rows(rows)

    def matching_scopes(self, scope: Scope) -> tuple[ScopeId, ...]:
        """Ids of the stored scopes that `scope` covers."""
        with self._db.read() as db:
            return _matching(db, scope)

    def find_duplicates(self, scope: Scope, texts: Iterable[str]) -> dict[tuple[str, str | None], FactId]:
        """Which of these texts exactly this scope already holds: by (text, time), the oldest fact of each."""
        with self._db.read() as db:
            rows = db.execute(
                """SELECT text, time, id FROM facts WHERE scope = ? AND hash IN (SELECT value FROM json_each(?))
                   ORDER BY seq DESC""",
                (scope.id, json_list(map(text_hash, texts))),
            )
            return {(text, time): fact_id for text, time, fact_id in rows}

    def scopes(self) -> Sequence[Scope]:
        """Every scope that holds something, of all tenants."""
        with self._db.read() as db:
            rows = db.execute("SELECT user, agent, run, tenant FROM scopes ORDER BY id")
            return [Scope(*row) for row in rows]

    def embeddings(
        self, scope: ScopeId, fact_ids: Sequence[FactId] | None = None
    ) -> tuple[tuple[FactId, ...], NDArray[np.float32]]:
        """Ids and embeddings [n, d] of exactly one scope (or of those of its facts), in order of insertion; a copy."""
        query, values = "SELECT id, embedding FROM facts WHERE scope = ?", [scope]
        if fact_ids is not None:
            query += " AND id IN (SELECT value FROM json_each(?))"
            values.append(ScopeId(json_list(fact_ids)))
        with self._db.read() as db:
            rows = db.execute(f"{query} ORDER BY seq", values).fetchall()
        vectors = np.frombuffer(bytearray().join(row[1] for row in rows), dtype="<f4")
        return tuple(row[0] for row in rows), vectors.reshape(len(rows), -1 if rows else 0)

    def adopt(self, settings: Mapping[str, str], embeddings: Sequence[tuple[FactId, Embedding]] | None = None) -> None:
        """Take the store for another model or embedder in one transaction; every reader of the feed reloads.

        `embeddings` must name every fact exactly once: mixed embeddings rank nonsense. InvalidInput otherwise.
        """
        vectors = [(embedding_bytes(embedding), fact_id) for fact_id, embedding in embeddings or ()]
        with self._db.write() as db:
            if embeddings is not None:
                living = sorted(row[0] for row in db.execute("SELECT id FROM facts"))
                if living != sorted(fact_id for _, fact_id in vectors):
                    raise InvalidInput("Memories came or went while the store was embedded again; run it once more.")
                db.execute("DELETE FROM meta WHERE key = 'embedding_dim'")
                for vector, _ in vectors:
                    _require_dimension(db, vector)
                db.executemany("UPDATE facts SET embedding = ? WHERE id = ?", vectors)
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", settings.items())
            announce_reset(db)

    def history(self, fact_id: FactId, tenant: str | None = None) -> Sequence[HistoryEntry]:
        """Events of one memory (of one tenant), oldest first. A deleted memory shows its deletion and no text."""
        with self._db.read() as db:
            rows = db.execute(
                """SELECT id, memory_id, old_memory, new_memory, event, created_at, updated_at, is_deleted
                   FROM history WHERE memory_id = ?1 AND (?2 IS NULL OR tenant = ?2) ORDER BY seq""",
                (fact_id, None if tenant is None else digest(tenant)),
            )
            return [HistoryEntry._make((*row[:7], bool(row[7]))) for row in rows]

    # --- forgetting ---

    def delete(self, fact_ids: Iterable[FactId], within: Wall = None) -> DeleteResult:
        """Forget facts: text, embedding, the turns they came from, and every text in their history.

        One transaction; ids that do not exist are ignored. Afterwards the bytes are gone from the
        database and, unless another process is reading just then, from its WAL (see `Database.scrub`).
        """
        with self._db.write() as db:
            doomed = _select(db, list(fact_ids), within)
            if not doomed:
                return DeleteResult()
            ids = json_list(doomed)
            said = db.execute(
                "SELECT turn_id FROM fact_turns WHERE fact_id IN (SELECT value FROM json_each(?))", (ids,)
            )
            turns: list[TurnId] = [row[0] for row in said]
            dependents = find_dependents(db, [*doomed, *turns])
            db.execute("DELETE FROM history WHERE memory_id IN (SELECT value FROM json_each(?))", (ids,))
            stamp = now()
            for fact in doomed.values():
                _record(db, fact, "DELETE", None, None, stamp)
            db.execute("DELETE FROM facts WHERE id IN (SELECT value FROM json_each(?))", (ids,))
            db.execute("DELETE FROM turns WHERE id IN (SELECT value FROM json_each(?))", (json_list(turns),))
            deleted = tuple(FactRef(fact.scope.id, fact.id) for fact in doomed.values())
            drop_empty_scopes(db, {ref.scope for ref in deleted})
            announce(db, "delete", deleted)
            announce(db, "put", dependents)
        self._db.scrub()
        return DeleteResult(deleted, tuple(dependents))

    def delete_scope(self, scope: Scope | str) -> DeleteResult:
        """Forget everything that `scope` covers, or a whole tenant: facts, turns, histories, owners' names."""
        with self._db.write() as db:
            scopes = _matching(db, scope)
            chosen = (json_list(scopes),)
            rows = db.execute(
                "SELECT scope, id FROM facts WHERE scope IN (SELECT value FROM json_each(?)) ORDER BY seq", chosen
            )
            deleted = tuple(FactRef(*row) for row in rows)
            for table in ("facts", "turns", "history"):
                db.execute(f"DELETE FROM {table} WHERE scope IN (SELECT value FROM json_each(?))", chosen)
            drop_empty_scopes(db, scopes)
            announce(db, "delete", deleted)
        self._db.scrub()
        return DeleteResult(deleted, scopes=scopes)


def _select(db: sqlite3.Connection, fact_ids: Sequence[FactId], within: Wall) -> dict[FactId, Fact]:
    where, values = scope_filter(within)
    rows = db.execute(
        f"{_FROM_FACTS} WHERE facts.id IN (SELECT value FROM json_each(?)) AND {where}", (json_list(fact_ids), *values)
    )
    return {fact.id: fact for fact in facts_from_rows(rows)}


def _matching(db: sqlite3.Connection, scope: Wall) -> tuple[ScopeId, ...]:
    where, values = scope_filter(scope)
    return tuple(row[0] for row in db.execute(f"SELECT id FROM scopes WHERE {where} ORDER BY id", values))


def _insert(db: sqlite3.Connection, fact: Fact, vector: bytes) -> None:
    require_id(fact.id, "fact")
    scope = register_scope(db, fact.scope)
    if fact.turn_id is not None:
        known = db.execute("SELECT 1 FROM turns WHERE id = ? AND scope = ?", (fact.turn_id, scope)).fetchone()
        if known is None:
            raise InvalidInput(f"Turn {fact.turn_id} is not in the fact's scope (was it deleted?); add it first.")
    columns = "id, scope, text, hash, time, turn_id, metadata, created_at, updated_at, embedding"
    values = (fact.id, scope, fact.text, text_hash(fact.text), fact.time, fact.turn_id, metadata_json(fact.metadata))
    try:
        db.execute(
            f"INSERT INTO facts ({columns}) VALUES ({', '.join('?' * 10)})",
            (*values, fact.created_at, fact.updated_at, vector),
        )
    except sqlite3.IntegrityError as error:
        raise InvalidInput(f"Fact {fact.id} cannot be added ({error}); give every fact an id of its own.") from error


def _record(db: sqlite3.Connection, fact: Fact, event: str, old: str | None, new: str | None, updated_at: str) -> None:
    """Append to the history. The tenant's name is kept as a digest only: it outlives the memory."""
    db.execute(
        """INSERT INTO history (id, memory_id, scope, tenant, old_memory, new_memory, event, created_at, updated_at,
           is_deleted) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        (
            str(uuid4()), fact.id, fact.scope.id, digest(fact.scope.tenant), old, new, event, fact.created_at,
            updated_at, event == "DELETE",
        ),
    )  # fmt: skip


def _require_dimension(db: sqlite3.Connection, vector: bytes) -> None:
    """The first embedding fixes the catalog's dimension; mixing embedders would rank nonsense."""
    dimension = str(len(vector) // 4)
    db.execute("INSERT OR IGNORE INTO meta VALUES ('embedding_dim', ?)", (dimension,))
    (stored,) = db.execute("SELECT value FROM meta WHERE key = 'embedding_dim'").fetchone()
    if stored != dimension:
        raise StoreMismatch(f"Embeddings here have {stored} dimensions, not {dimension}; use the store's own embedder.")
