"""Where the process that plans a request meets vLLM's processes: small files beside the KV.

A plan's record holds digests and lengths, no token and no text. Its name is the plan's unguessable id
(a capability, invariant 4); only the owner of the store may read it; it expires; it goes with its request.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inferscale.core import ChunkKey, FactId, Plan, PlanChunk, Recipe, ScopeId, digest, token_digest
from inferscale.errors import PlanRejected
from inferscale.store.format import HEADER_BYTES, DamagedChunk, read_checksum, relative_path

FOLDER = ".plans"
VERSION = 1
HEADER_SCOPE = ScopeId("header")
HEADER_FACT = FactId("header")
EXPIRES_AFTER = 900.0
"""Seconds that a plan may wait in the engine's queue before it is prefilled as text."""
MAX_RECORD_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_-]{16,64}")


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """What vLLM's processes need to know of a plan; `chunks` cover tokens [0, `tokens`), the header first."""

    recipe: Recipe
    salt: str
    expires: float
    chunks: tuple[PlanChunk, ...]

    @property
    def tokens(self) -> int:
        """Tokens to inject."""
        return self.chunks[-1].start + self.chunks[-1].length


def header_key(recipe: Recipe, token_ids: Sequence[int]) -> ChunkKey:
    """The key under which a header's exact KV lies in the store."""
    return ChunkKey(HEADER_SCOPE, HEADER_FACT, recipe.id, token_digest(token_ids))


def record_of(plan: Plan, recipe: Recipe, root: Path) -> PlanRecord:
    """The record of `plan`, whose chunks lie below `root`; PlanRejected if one of them does not."""
    header = header_key(recipe, plan.token_ids[: plan.header_tokens])
    chunks = (PlanChunk(header, 0, plan.header_tokens), *plan.chunks)
    # The files' contents are part of the salt: KV that is made again, because something it was computed from
    # was forgotten, has the same key, and must not be answered from blocks of the old one.
    parts = [[*asdict(chunk.key).values(), _contents(root, chunk.key)] for chunk in chunks]
    salt = digest([plan.scope.id, recipe.id, parts])
    return PlanRecord(recipe, salt, time.time() + EXPIRES_AFTER, chunks)


def _contents(root: Path, key: ChunkKey) -> str:
    try:
        with open(f"{root}/{relative_path(key)}", "rb", buffering=0) as file:
            return read_checksum(file.read(HEADER_BYTES))
    except (OSError, DamagedChunk):
        raise PlanRejected("missing_chunk", f"The KV of fact {key.fact} is not in the store.") from None


class PlanBoard:
    """The records in one store. Any number of processes may use the same folder."""

    def __init__(self, root: Path) -> None:
        """`root`: the folder of the KV files (`DiskStore.folder`)."""
        self._folder = Path(root) / FOLDER
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def publish(self, name: str, record: PlanRecord) -> None:
        """Make a record visible under `name`, whole or not at all."""
        value = {
            "version": VERSION,
            "recipe": asdict(record.recipe),
            "salt": record.salt,
            "expires": record.expires,
            "chunks": [[c.key.scope, c.key.fact, c.key.tokens, c.length] for c in record.chunks],
        }
        self._write(self._path(name), value)

    def read(self, name: Any) -> PlanRecord:
        """The record named `name` (anything a client sent). Raises PlanRejected with the reason."""
        try:
            with open(self._path(name), "rb") as file:
                text = file.read(MAX_RECORD_BYTES + 1)
        except OSError:
            raise PlanRejected("unknown_plan", "No such plan in this store; plan the request again.") from None
        record = _parse(text)
        if record.expires < time.time():
            raise PlanRejected("expired_plan", "The plan waited too long; plan the request again.")
        return record

    def has(self, name: str) -> bool:
        """True if there is a record of this name, whatever is in it."""
        try:
            return self._path(name).exists()
        except PlanRejected:
            return False

    def retire(self, name: str) -> None:
        """Remove a record and what was noted of it. Idempotent."""
        for path in (self._path(name), self._note_path(name)):
            path.unlink(missing_ok=True)

    def note(self, name: str, reason: str) -> None:
        """Tell the planner why its plan was not injected; silent if the plan is gone already."""
        with suppress(OSError, PlanRejected):
            if self._path(name).exists():
                self._write(self._note_path(name), {"reason": reason})

    def noted(self, name: str) -> str | None:
        """Why the plan was not injected, or None."""
        try:
            reason = json.loads(self._note_path(name).read_text(encoding="utf-8"))["reason"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return str(reason)

    def sweep(self) -> int:
        """Remove records that expired and leftovers of killed processes; returns how many files."""
        removed = 0
        oldest = time.time() - EXPIRES_AFTER
        for path in self._folder.iterdir():
            with suppress(OSError):
                if path.stat().st_mtime < oldest and self._is_over(path):
                    path.unlink()
                    removed += 1
        return removed

    def _is_over(self, path: Path) -> bool:
        try:
            self.read(path.name)
        except PlanRejected:
            return True
        return False

    def _path(self, name: Any) -> Path:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PlanRejected("unknown_plan", "A plan's id has 16 to 64 letters, digits, - and _.")
        return self._folder / name

    def _note_path(self, name: str) -> Path:
        return self._path(name).with_suffix(".note")

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        temporary = self._folder / f"{secrets.token_hex(8)}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(value, file, separators=(",", ":"))
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _parse(text: bytes) -> PlanRecord:
    try:
        if len(text) > MAX_RECORD_BYTES:
            raise ValueError
        value = json.loads(text)
        if value["version"] != VERSION:
            raise ValueError
        recipe = Recipe(**value["recipe"])
        chunks, at = [], 0
        for scope, fact, tokens, length in value["chunks"]:
            if not isinstance(length, int) or length < 1:
                raise ValueError
            chunks.append(PlanChunk(ChunkKey(ScopeId(scope), FactId(fact), recipe.id, tokens), at, length))
            relative_path(chunks[-1].key)  # names that a path can be made of
            at += length
        if not chunks or not isinstance(value["salt"], str):
            raise ValueError
        return PlanRecord(recipe, value["salt"], float(value["expires"]), tuple(chunks))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise PlanRejected("damaged_plan", "The plan's record cannot be read; plan the request again.") from None
