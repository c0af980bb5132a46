"""What goes into and comes out of the catalog's rows."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.core import Fact, FactId, Scope, ScopeId, Turn, TurnId, digest
from inferscale.errors import InvalidInput

SourceKind = Literal["fact", "turn"]
Embedding = bytes | NDArray[np.float32]

FACT_COLUMNS = (
    "facts.id, facts.text, facts.time, facts.turn_id, facts.metadata, facts.created_at, facts.updated_at, "
    "scopes.tenant, scopes.user, scopes.agent, scopes.run"
)


class FactRef(NamedTuple):
    """A fact and its scope: what a KV tier needs to delete it."""

    scope: ScopeId
    fact: FactId


class Change(NamedTuple):
    """One line of the change feed. A 'put' also announces a fact whose KV went stale."""

    op: Literal["put", "delete"]
    scope: ScopeId
    fact: FactId


class Reload(Enum):
    """The answer to a reader of the change feed that is too far behind."""

    RELOAD = "reload"


RELOAD = Reload.RELOAD


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """What a deletion removed, and what must be re-encoded because it was derived from that."""

    deleted: tuple[FactRef, ...] = ()
    """Facts that are gone; their KV must be deleted."""
    dependents: tuple[FactRef, ...] = ()
    """Living facts whose KV was computed from a deleted fact or turn; their KV must be deleted too."""
    scopes: tuple[ScopeId, ...] = ()
    """Scopes removed as a whole by `delete_scope`."""


class HistoryEntry(NamedTuple):
    """One event of a memory's life, in the shape of Mem0's `history()`."""

    id: str
    memory_id: FactId
    old_memory: str | None
    new_memory: str | None
    event: Literal["ADD", "UPDATE", "DELETE"]
    created_at: str
    updated_at: str
    is_deleted: bool


def text_hash(text: str) -> str:
    """32 hex digits naming a fact's text exactly (MD5, as Mem0 shows it; not a security measure)."""
    try:
        return hashlib.md5(text.encode("utf-8"), usedforsecurity=False).hexdigest()
    except UnicodeEncodeError:
        raise InvalidInput("A fact's text is not valid Unicode; pass text without lone surrogates.") from None


def now() -> str:
    """The time as ISO 8601 in UTC with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def json_list(values: Iterable[str]) -> str:
    """Values for `IN (SELECT value FROM json_each(?))`: one parameter, however many there are.

    SQLite cuts JSON text at a NUL, which would make it name another row; no stored id holds one.
    """
    return json.dumps([value for value in values if "\x00" not in value])


def require_id(value: str, what: str) -> None:
    """Raise InvalidInput for an id that could not be found again."""
    if not value or "\x00" in value:
        raise InvalidInput(f"A {what}'s id must be text without NUL characters, got {value!r}.")


def metadata_json(metadata: dict[str, Any]) -> str:
    """Metadata as it is stored; raises InvalidInput if it is not JSON."""
    try:
        return json.dumps(metadata, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"metadata must be JSON values ({error}).") from None


def embedding_bytes(embedding: Embedding) -> bytes:
    """An embedding [d] as little-endian float32."""
    if isinstance(embedding, bytes):
        if not embedding or len(embedding) % 4:
            raise InvalidInput(f"An embedding is float32 values, got {len(embedding)} bytes.")
        return embedding
    array = np.asarray(embedding, dtype="<f4")
    if array.ndim != 1 or not array.size:
        raise InvalidInput(f"An embedding is one vector of shape [d], got {list(array.shape)}.")
    return array.tobytes()


Wall = Scope | str | None
"""What a read or write may reach: what a query's scope covers, a whole tenant (by name), or everything (None)."""


def scope_filter(scope: Wall) -> tuple[str, list[str]]:
    """SQL over table `scopes`, and its parameters, for what `scope` covers.

    This is the one place where a query's scope becomes SQL; it says the same as `Scope.covers`.
    """
    if scope is None:
        return "TRUE", []
    if isinstance(scope, str):
        return "scopes.tenant = ?", [scope]
    wanted = {"tenant": scope.tenant, "user": scope.user, "agent": scope.agent, "run": scope.run}
    given = {column: value for column, value in wanted.items() if value is not None}
    indexed = {f"by_{column}": owner_digest(scope, column) for column in given if column != "tenant"}
    terms = {**indexed, **given}
    return " AND ".join(f"scopes.{column} = ?" for column in terms), [value or "" for value in terms.values()]


def owner_digest(scope: Scope, column: str) -> str | None:
    """What the index over `column` (user, agent or run) holds instead of the owner's name."""
    value = getattr(scope, column)
    return None if value is None else digest([scope.tenant, column, value])


def facts_from_rows(rows: Iterable[tuple[Any, ...]]) -> list[Fact]:
    """Rows of FACT_COLUMNS. Facts of one owner share one `Scope`: checking it anew for each took half the time."""
    scopes: dict[tuple[Any, ...], Scope] = {}
    return [_fact(row, scopes) for row in rows]


def _fact(row: tuple[Any, ...], scopes: dict[tuple[Any, ...], Scope]) -> Fact:
    fact_id, text, time, turn_id, metadata, created_at, updated_at, tenant, user, agent, run = row
    owner = (tenant, user, agent, run)
    scope = scopes.get(owner)
    if scope is None:
        scope = scopes[owner] = Scope(user=user, agent=agent, run=run, tenant=tenant)
    return Fact(
        id=FactId(fact_id),
        text=text,
        scope=scope,
        time=time,
        turn_id=None if turn_id is None else TurnId(turn_id),
        metadata=json.loads(metadata) if metadata != "{}" else {},
        created_at=created_at,
        updated_at=updated_at,
    )


def turn_from_row(row: tuple[Any, ...]) -> Turn:
    """A row of (id, speaker, text, time)."""
    turn_id, speaker, text, time = row
    return Turn(speaker, text, time, TurnId(turn_id))


def register_scope(db: sqlite3.Connection, scope: Scope) -> ScopeId:
    """Make the scope's row if there is none."""
    db.execute(
        """INSERT OR IGNORE INTO scopes (id, tenant, user, agent, run, by_user, by_agent, by_run)
           VALUES (?, ?, ?, ?, ?, ?, ?, ?)""",
        (
            *(scope.id, scope.tenant, scope.user, scope.agent, scope.run),
            *(owner_digest(scope, column) for column in ("user", "agent", "run")),
        ),
    )
    return scope.id


def drop_empty_scopes(db: sqlite3.Connection, scopes: Iterable[ScopeId]) -> None:
    """Owners' names are personal too: a scope without facts and turns leaves nothing."""
    db.execute(
        """DELETE FROM scopes WHERE id IN (SELECT value FROM json_each(?))
           AND NOT EXISTS (SELECT 1 FROM facts WHERE facts.scope = scopes.id)
           AND NOT EXISTS (SELECT 1 FROM turns WHERE turns.scope = scopes.id)""",
        (json_list(scopes),),
    )
