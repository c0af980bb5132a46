"""Tiny random-weight models of every supported family and RoPE kind: small enough to read a failure."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from inferscale.decoder.transformers import TransformersDecoder

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}
CASES = [(family, kind) for family in CONFIGS for kind in ROPE]


def tiny_config(family: str, kind: str = "default", **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_parameters": dict(ROPE[kind]),
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if family == "qwen2":
        settings.pop("head_dim")  # Qwen2 derives it: 32 / 4 = 8
    if family == "llama":
        settings.pop("sliding_window")
    settings.update(changes)
    return CONFIGS[family](**settings)


def tiny_decoder(family: str = "llama", kind: str = "default", **changes: Any) -> TransformersDecoder:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(tiny_config(family, kind, **changes), attn_implementation="eager")
    with torch.no_grad():  # zero biases and unit norms would hide a forgotten bias or norm
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn_like(weight))
            elif "proj" in name:
                weight.mul_(4.0)  # so that attention is far from uniform
    return TransformersDecoder(model.float(), f"tiny-{family}", f"tiny-{family}-{kind}")


def random_ids(n: int, seed: int = 0, vocab: int = 97) -> torch.Tensor:
    return torch.randint(3, vocab, (n,), generator=torch.Generator().manual_seed(seed))
