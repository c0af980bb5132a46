"""Memories over the tiny engine and the real sentence encoder: everything but the size is real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inferscale import Memory
from inferscale.engine.transformers import TransformersEngine
from inferscale.index.embed import SentenceTransformerEmbedder

Open = Callable[..., Memory]


@pytest.fixture
def open_memory(
    tmp_path: Path, tiny_engine: TransformersEngine, embedder: SentenceTransformerEmbedder
) -> Iterator[Open]:
    """Open the test's store (again); everything opened is closed at the end."""
    opened: list[Memory] = []

    def open_again(path: Path | None = None, **options: Any) -> Memory:
        options = {"embedder": embedder, **options}
        engine = options.pop("engine", tiny_engine)
        memory = Memory(engine, path or tmp_path / "store", **options)
        opened.append(memory)
        return memory

    yield open_again
    for memory in opened:
        memory.close()


@pytest.fixture
def memory(open_memory: Open) -> Memory:
    return open_memory()
