"""InferScale: memories as KV, placed straight into the engine's cache."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferscale.answer import Reply
    from inferscale.config import EncodeConfig, MemoryConfig, RetrieveConfig, Sampling, StoreConfig
    from inferscale.core import Scope, Turn
    from inferscale.engine import Engine
    from inferscale.errors import InferScaleError
    from inferscale.memory import Memory

__version__ = "0.1.0"

_HOMES = {
    "EncodeConfig": "config",
    "Engine": "engine",
    "InferScaleError": "errors",
    "Memory": "memory",
    "MemoryConfig": "config",
    "Reply": "answer",
    "RetrieveConfig": "config",
    "Sampling": "config",
    "Scope": "core",
    "StoreConfig": "config",
    "Turn": "core",
}

__all__ = [
    "EncodeConfig",
    "Engine",
    "InferScaleError",
    "Memory",
    "MemoryConfig",
    "Reply",
    "RetrieveConfig",
    "Sampling",
    "Scope",
    "StoreConfig",
    "Turn",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: `import inferscale` and `--help` stay free of torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'inferscale' has no attribute {name!r}")
    return getattr(importlib.import_module(f"inferscale.{_HOMES[name]}"), name)
