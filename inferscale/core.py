"""The nouns of InferScale: what a memory is, who owns it, how its KV was made, how it is served.

Everything here is a frozen value; nothing here imports torch at run time. Digests are BLAKE2b over
canonical JSON, so they are the same in every process and on every machine.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NewType

from inferscale.errors import InvalidInput, InvalidScope

if TYPE_CHECKING:
    import torch

FactId = NewType("FactId", str)
TurnId = NewType("TurnId", str)
ScopeId = NewType("ScopeId", str)
RecipeId = NewType("RecipeId", str)
PlanId = NewType("PlanId", str)

MAX_OWNER_CHARS = 1024


def digest(value: Any) -> str:
    """32 hex digits of BLAKE2b over `value` as canonical JSON (stable across processes)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()


def token_digest(token_ids: Sequence[int]) -> str:
    """32 hex digits naming exactly this sequence of token ids."""
    return digest([int(t) for t in token_ids])


@dataclass(frozen=True, slots=True)
class Scope:
    """Who a memory belongs to. A scope is a wall: no read or write crosses it.

    A stored memory carries one full scope. A query's scope reaches every memory whose fields equal
    the fields that the query sets, within one tenant (`covers`); at least one of user, agent, run
    must be set, so no query can reach a whole tenant.
    """

    user: str | None = None
    agent: str | None = None
    run: str | None = None
    tenant: str = "default"

    def __post_init__(self) -> None:
        for name in ("tenant", "user", "agent", "run"):
            value = getattr(self, name)
            if value is None and name != "tenant":
                continue
            if not isinstance(value, str) or not value.strip():
                raise InvalidScope(f"{name} must be a non-empty string, got {value!r}.")
            if len(value) > MAX_OWNER_CHARS:
                raise InvalidScope(f"{name} is {len(value)} characters long; the limit is {MAX_OWNER_CHARS}.")
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise InvalidScope(f"{name} is not valid Unicode; pass text without lone surrogates.") from None
        if self.user is None and self.agent is None and self.run is None:
            raise InvalidScope("Say who the memory belongs to: pass user_id, agent_id or run_id.")

    @property
    def id(self) -> ScopeId:
        """32 hex digits; says nothing readable about the owner, so it is safe in file names."""
        return ScopeId(digest([self.tenant, self.user, self.agent, self.run]))

    def covers(self, other: Scope) -> bool:
        """True if a query with this scope may see a memory that belongs to `other`."""
        return self.tenant == other.tenant and all(
            mine is None or mine == theirs
            for mine, theirs in ((self.user, other.user), (self.agent, other.agent), (self.run, other.run))
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation. `time` is text as it should be shown ("8 May 2023")."""

    speaker: str
    text: str
    time: str | None = None
    id: TurnId | None = None

    @property
    def line(self) -> str:
        """How the turn stands in a context window: one line, ending in a newline."""
        return f"{one_line(self.speaker)}: {one_line(self.text)}\n"


@dataclass(frozen=True, slots=True)
class Fact:
    """One short, independently retrievable statement; the unit that is stored and retrieved."""

    id: FactId
    text: str
    scope: Scope
    time: str | None = None
    turn_id: TurnId | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    created_at: str = ""
    updated_at: str = ""

    @property
    def line(self) -> str:
        """How the fact is served and encoded: one line, ending in a newline (part of the recipe)."""
        return render_fact(self.text, self.time)


def render_fact(text: str, time: str | None) -> str:
    """The served form of a fact. Changing this changes `ENCODER_VERSION` in `encode/base.py`."""
    return f"[{one_line(time)}] {one_line(text)}\n" if time else f"- {one_line(text)}\n"


def one_line(text: str) -> str:
    """`text` with every run of whitespace (newlines too) as one space."""
    return " ".join(text.split())


def clean_text(text: object, what: str = "text") -> str:
    """A caller's text, checked: a str, valid Unicode, not blank; NUL removed, NFC-normalised."""
    if not isinstance(text, str):
        raise InvalidInput(f"{what} must be a string, got {type(text).__name__}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidInput(f"{what} is not valid Unicode; pass text without lone surrogates.") from None
    cleaned = unicodedata.normalize("NFC", text.replace("\x00", ""))
    if not cleaned.strip():
        raise InvalidInput(f"{what} is empty; pass at least one visible character.")
    return cleaned


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How a model rotates: its kind (default, linear, llama3, yarn) and its scaling parameters."""

    kind: str
    theta: float
    attention_scaling: float = 1.0
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What has to be known of a model to hold and move its KV.

    `fingerprint` digests the weights and the config; two models with the same fingerprint make the
    same KV. `dtype` is the torch name ("float32"). `max_positions` counts tokens.
    """

    name: str
    family: str
    fingerprint: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: str
    rope: RopeSpec

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        size = 4 if self.dtype == "float32" else 2
        return 2 * self.layers * self.kv_heads * self.head_dim * size


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides how a chunk's KV was made; KV of another recipe is never injected.

    `window` counts turns, `companions` counts facts, `mode` is "exact" or "streaming". `header`
    digests the header's token ids.
    """

    model: str
    dtype: str
    tokenizer: str
    header: str
    window: int
    companions: int
    mode: str
    encoder_version: int

    @property
    def id(self) -> RecipeId:
        """32 hex digits over every field."""
        return RecipeId(digest(asdict(self)))


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """Names one chunk's KV. `tokens` digests its token ids: an edited fact has another key."""

    scope: ScopeId
    fact: FactId
    recipe: RecipeId
    tokens: str


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV:
    """One chunk's KV: `keys` (before rotation) and `values`, each [layers, n, kv_heads, head_dim]."""

    token_ids: tuple[int, ...]
    keys: torch.Tensor
    values: torch.Tensor

    def __post_init__(self) -> None:
        assert self.keys.shape == self.values.shape and self.keys.ndim == 4
        assert self.keys.shape[1] == len(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True)
class Hit:
    """A fact found by a search; a higher `score` (cosine, -1 to 1) is better."""

    fact: Fact
    score: float


@dataclass(frozen=True, slots=True)
class PlanChunk:
    """One chunk's place in a plan: tokens [start, start + length) of the prompt."""

    key: ChunkKey
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one request injects: integers only, no tensors.

    `token_ids` is the injected prefix (the header, then every chunk); virtual positions are its
    indices. `hot_ids` follow as ordinary text. The id is an unguessable capability.
    """

    scope: Scope
    recipe: RecipeId
    header_tokens: int
    token_ids: tuple[int, ...]
    chunks: tuple[PlanChunk, ...]
    hot_ids: tuple[int, ...] = ()
    id: PlanId = field(default_factory=lambda: PlanId(secrets.token_urlsafe(24)))

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Injected prefix and hot suffix: everything that stands before the conversation."""
        return self.token_ids + self.hot_ids
