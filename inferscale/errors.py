"""Every exception InferScale raises on purpose.

InferScaleError
├── ConfigError            an option is unknown or out of range
├── InvalidInput           a caller's value cannot be used (also a ValueError)
│   ├── InvalidScope       a memory has no owner, or an owner field is malformed
│   └── PromptTooLong      the request does not fit the model's context
├── MemoryNotFound         no such memory in this store (also a KeyError)
├── ModelError
│   ├── ModelNotFound      the name is no folder, cached hub id or packaged model
│   ├── ModelDamaged       a model folder lacks a file, or a file is truncated
│   └── UnsupportedModel   architecture, RoPE kind or attention type is not covered
├── EmbeddingError         the embedding model or endpoint failed
├── EngineUnavailable      the inference engine is starting, gone or too busy; try again later
├── PlanRejected           a plan failed verification; `reason` is a fixed word
└── StoreError
    ├── StoreMismatch      the store was made by another model, recipe or embedder
    ├── StoreBusy          another process held the store longer than the bounded wait
    ├── StoreFull          the disk is full; nothing was acknowledged
    └── StoreDamaged       the catalog cannot be read

Each message is one sentence that says what to do next.
"""

from __future__ import annotations


class InferScaleError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(InferScaleError):
    """An option is unknown or out of range."""


class InvalidInput(InferScaleError, ValueError):
    """A caller's value cannot be used."""


class InvalidScope(InvalidInput):
    """A memory has no owner, or an owner field is malformed."""


class PromptTooLong(InvalidInput):
    """The request does not fit the model's context."""


class MemoryNotFound(InferScaleError, KeyError):
    """No such memory in this store."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else "memory not found"


class ModelError(InferScaleError):
    """A model cannot be used."""


class ModelNotFound(ModelError):
    """The name is no folder, cached hub id or packaged model."""


class ModelDamaged(ModelError):
    """A model folder lacks a file, or a file is truncated."""


class UnsupportedModel(ModelError):
    """The architecture, RoPE kind or attention type is not covered."""


class EmbeddingError(InferScaleError):
    """The embedding model or endpoint failed."""


class EngineUnavailable(InferScaleError):
    """The inference engine is starting, gone or too busy; the same request may succeed later."""


class PlanRejected(InferScaleError):
    """A plan failed verification, so nothing of it may be injected (invariant 2).

    `reason` is one fixed word, fit for a metric label: ``missing_chunk``, ``token_mismatch``,
    ``recipe_mismatch``, ``shape_mismatch``, ``prompt_mismatch``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StoreError(InferScaleError):
    """The store cannot do what was asked."""


class StoreMismatch(StoreError):
    """The store was made by another model, recipe or embedder."""


class StoreBusy(StoreError):
    """Another process held the store longer than the bounded wait."""


class StoreFull(StoreError):
    """The disk is full; nothing was acknowledged."""


class StoreDamaged(StoreError):
    """The catalog cannot be read."""
