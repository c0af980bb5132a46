"""Real engines, each started once: SmolLM2 in float32, and tiny random models for what needs an engine of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inferscale.engine.vllm.compat import vllm_version
from tests.tiny import tiny_config

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

if vllm_version() is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.engine.vllm.kit import Desk, start


@pytest.fixture(scope="session")
def desk(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """SmolLM2-135M-Instruct in vLLM, float32."""
    engine = start(model_path, tmp_path_factory.mktemp("memory"))
    yield Desk(engine)
    engine.close()


@pytest.fixture(scope="session")
def tiny_model(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama that two workers can share: 4 heads, 2 KV heads."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = tiny_config(
        "llama",
        "llama3",
        vocab_size=len(tokenizer),
        hidden_size=128,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():  # attention far from uniform, so that an answer hangs on what is attended to, and where
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.mul_(4.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
