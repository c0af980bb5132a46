"""The two ways to a vLLM engine behind one contract: token ids in, token ids out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from inferscale.config import Sampling
from inferscale.errors import EngineUnavailable


@dataclass(frozen=True, slots=True)
class Call:
    """One generation after `prompt_ids`; one of `ends` is its last token, unless `max_tokens` end it.

    With the id of a published `plan` and its `salt`, the plan's KV is injected.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    ends: tuple[int, ...]
    plan: str | None = None
    salt: str | None = None

    @property
    def transfer_params(self) -> dict[str, Any] | None:
        """vLLM's `kv_transfer_params`."""
        return None if self.plan is None else {"inferscale": {"plan": self.plan}}


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens; `cached` counts the prompt's tokens that were not computed, None while it is not known."""

    ids: tuple[int, ...] = ()
    cached: int | None = None


class CallFailed(EngineUnavailable):
    """vLLM gave up this one call; of a call with a plan this is how it says that the KV could not be loaded."""


class Transport(ABC):
    """A running engine. Methods may be called from any thread."""

    max_model_len: int
    """Tokens that its context holds."""

    @abstractmethod
    def generate(self, call: Call) -> Generator[Tokens]:
        """Tokens as they come; closing it stops the generation. Raises CallFailed, EngineUnavailable, InvalidInput."""

    @abstractmethod
    def health(self) -> str | None:
        """None if it answers, else one sentence that says why not. Never waits."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it. Idempotent."""
