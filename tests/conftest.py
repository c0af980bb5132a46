"""What every test gets: no network, a home folder of its own, fixed seeds, the demo models."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is first imported

import hypothesis
import numpy as np
import pytest
import torch

from inferscale import config
from inferscale.decoder.transformers import load_tokenizer
from inferscale.engine.base import Engine
from inferscale.engine.transformers import TransformersEngine
from inferscale.index.embed import SentenceTransformerEmbedder
from inferscale.models import resolve_model
from tests.tiny import tiny_decoder

hypothesis.settings.register_profile("local", deadline=None, max_examples=30)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session", autouse=True)
def inferscale_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home folder for this run, so that no test sees or leaves memories of the developer's own.

    Converted models are the one thing shared with the real home: unpacking takes 20 seconds.
    """
    models = config.home() / "models"
    models.mkdir(parents=True, exist_ok=True)
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(models.resolve(), target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFERSCALE_HOME", str(home))
        yield home


@pytest.fixture(scope="session", autouse=True)
def two_threads() -> None:
    """The same speed and the same sums on every machine."""
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def model_path(inferscale_home: Path) -> Path:
    """SmolLM2-135M-Instruct as a safetensors folder."""
    return resolve_model("smollm2-135m-instruct").path


@pytest.fixture(scope="session")
def encoder_path(inferscale_home: Path) -> Path:
    """The MiniLM sentence encoder's folder."""
    return resolve_model("all-minilm-l6-v2").path


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Any:
    """SmolLM2's tokenizer."""
    return load_tokenizer(model_path)


@pytest.fixture(scope="session")
def tiny_engine(tokenizer: Any) -> TransformersEngine:
    """A tiny random model behind the real tokenizer: the engine's whole path in milliseconds."""
    decoder = tiny_decoder("llama", "llama3", vocab_size=len(tokenizer), max_position_embeddings=512)
    return TransformersEngine(decoder, tokenizer)


@pytest.fixture(scope="session")
def real_engine(model_path: Path) -> Engine:
    """SmolLM2-135M-Instruct in float32."""
    return Engine.from_pretrained(model_path, dtype="float32")


@pytest.fixture(scope="session")
def embedder(encoder_path: Path) -> SentenceTransformerEmbedder:
    """MiniLM."""
    return SentenceTransformerEmbedder(encoder_path, name="all-minilm-l6-v2")
