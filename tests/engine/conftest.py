"""A tiny random model behind the real tokenizer: the engine's whole path in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferscale.decoder.transformers import load_tokenizer
from inferscale.engine.transformers import TransformersEngine
from tests.tiny import tiny_decoder


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Any:
    return load_tokenizer(model_path)


@pytest.fixture(scope="session")
def tiny_engine(tokenizer: Any) -> TransformersEngine:
    decoder = tiny_decoder("llama", "llama3", vocab_size=len(tokenizer), max_position_embeddings=512)
    return TransformersEngine(decoder, tokenizer)
