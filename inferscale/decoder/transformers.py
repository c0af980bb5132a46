"""`LayerwiseDecoder` over Hugging Face transformers, the only place of the package that knows its modules.

A new model family is one entry in `FAMILIES` (CONTRIBUTING.md, "Add a model family").
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as _logging

from inferscale.core import ModelSpec, RopeSpec
from inferscale.decoder.base import LayerwiseDecoder, Mask
from inferscale.errors import ModelDamaged, UnsupportedModel

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between families whose decoder layers are otherwise alike.

    `qk_norm`: queries and keys are normalised per head before rotation (`q_norm`, `k_norm`).
    """

    title: str
    qk_norm: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral"),
    "qwen2": Family("Qwen2/Qwen2.5"),
    "qwen3": Family("Qwen3", qk_norm=True),
}


def supported() -> str:
    """One line for error messages: what this decoder covers."""
    names = ", ".join(family.title for family in FAMILIES.values())
    return f"Supported: {names} with full attention and RoPE kinds {', '.join(ROPE_KINDS)}."


def check_supported(config: Any) -> None:
    """Raise UnsupportedModel unless every layer of this transformers config is one that we compute exactly."""
    name = getattr(config, "model_type", "unknown")
    if name not in FAMILIES:
        raise UnsupportedModel(f"Model type {name!r} is not supported. {supported()}")
    kinds = {"full_attention", *(getattr(config, "layer_types", None) or ())}
    if kinds != {"full_attention"}:
        raise UnsupportedModel(f"Layers of type {sorted(kinds - {'full_attention'})} are not supported. {supported()}")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings and name == "mistral":
        raise UnsupportedModel(f"Sliding-window attention ({window} tokens) is in use. {supported()}")
    parameters = rope_parameters(config)
    if parameters["rope_type"] not in ROPE_KINDS:
        raise UnsupportedModel(f"RoPE kind {parameters['rope_type']!r} is not supported. {supported()}")
    if float(parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(f"Partial rotary embedding is not supported. {supported()}")


def rope_parameters(config: Any) -> dict[str, Any]:
    """The config's RoPE parameters with `rope_type` always present; UnsupportedModel without RoPE."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping) or "rope_theta" not in parameters:
        raise UnsupportedModel(f"The model has no rotary position embedding of a known form. {supported()}")
    return {"rope_type": "default", **parameters}


class TransformersDecoder(LayerwiseDecoder):
    """Drives the modules of a loaded transformers model; holds no second copy of a weight."""

    def __init__(self, model: Any, name: str, fingerprint: str) -> None:
        check_supported(model.config)
        self.model = model.eval().requires_grad_(False)
        self.dtype = next(model.parameters()).dtype
        self.device = next(model.parameters()).device
        self.exclusive = threading.Lock() if self.device.type == "cpu" else nullcontext()
        self._family = FAMILIES[model.config.model_type]
        self._layers: list[Any] = list(model.model.layers)
        self.spec = _spec(model, name, fingerprint, self.dtype)
        self._tables = self._rotation_tables(1024)

    def embed(self, token_ids: Tensor) -> Tensor:
        hidden: Tensor = self.model.model.embed_tokens(token_ids)
        return hidden

    def project(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        block = self._layers[layer]
        attention = block.self_attn
        n, d = len(hidden), self.spec.head_dim
        x = block.input_layernorm(hidden)
        q = attention.q_proj(x).view(n, self.spec.heads, d)
        k = attention.k_proj(x).view(n, self.spec.kv_heads, d)
        v = attention.v_proj(x).view(n, self.spec.kv_heads, d)
        if self._family.qk_norm:
            q, k = attention.q_norm(q), attention.k_norm(k)
        return q, k, v

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        needed = int(positions.max()) + 1 if len(positions) else 0
        tables = self._tables  # another thread may replace them meanwhile
        if needed > len(tables[0]):
            tables = self._tables = self._rotation_tables(2 * needed)
        cos, sin = tables
        return cos[positions], sin[positions]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=mask.bias,
            is_causal=mask.causal,
            scale=self._layers[layer].self_attn.scaling,
            enable_gqa=self.spec.heads != self.spec.kv_heads,
        )
        return out[0].transpose(0, 1).reshape(len(q), -1)

    def finish(self, layer: int, hidden: Tensor, out: Tensor) -> Tensor:
        block = self._layers[layer]
        hidden = hidden + block.self_attn.o_proj(out)
        result: Tensor = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.model.lm_head(self.model.model.norm(hidden))
        return out.float()

    def _rotation_tables(self, length: int) -> tuple[Tensor, Tensor]:
        """cos, sin [length, D] by the model's own rotary module (all kinds are fixed functions of position)."""
        positions = torch.arange(length, device=self.device)[None]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self.model.model.rotary_emb(like, positions)
        return cos[0].contiguous(), sin[0].contiguous()


def _spec(model: Any, name: str, fingerprint: str, dtype: torch.dtype) -> ModelSpec:
    config = model.config
    parameters = rope_parameters(config)
    heads = int(config.num_attention_heads)
    return ModelSpec(
        name=name,
        family=config.model_type,
        fingerprint=fingerprint,
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(config.num_key_value_heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        hidden_size=int(config.hidden_size),
        vocab_size=int(config.vocab_size),
        max_positions=int(config.max_position_embeddings),
        dtype=str(dtype).removeprefix("torch."),
        rope=RopeSpec(
            kind=parameters["rope_type"],
            theta=float(parameters["rope_theta"]),
            attention_scaling=float(model.model.rotary_emb.attention_scaling),
            parameters=parameters,
        ),
    )


def load_decoder(folder: Path, *, name: str, fingerprint: str, dtype: torch.dtype, device: str) -> TransformersDecoder:
    """Load a checked model folder from disk (never the network) as a decoder.

    Raises UnsupportedModel before the weights are read, ModelDamaged when they do not load whole.
    """
    try:
        check_supported(AutoConfig.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, UnsupportedModel):
            raise
        raise UnsupportedModel(f"{name}: the config is not one transformers knows ({error}). {supported()}") from error
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, attn_implementation="sdpa", output_loading_info=True
            )
    except ImportError as error:  # a quantisation whose kernels are another package
        raise UnsupportedModel(f"{name} needs a package that is not installed ({error}). {supported()}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelDamaged(f"The weights in {folder} do not load ({error}); download or convert them again.") from error
    model, report = loaded
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ModelDamaged(f"{folder} lacks weights ({missing}, …); download or convert it again.")
    return TransformersDecoder(model.to(device), name, fingerprint)


def load_tokenizer(folder: Path) -> Any:
    """The folder's transformers tokenizer; ModelDamaged when it has none."""
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelDamaged(f"{folder} has no usable tokenizer ({error}); download or convert it again.") from error


def convert_gguf(source: Path, target: Path) -> None:
    """Unpack a GGUF file into a float32 safetensors folder, tokenizer and chat template included.

    Raises whatever the readers raise on a damaged file; `inferscale.models` turns that into ModelDamaged.
    """
    with quiet():
        config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer.model_max_length = config.max_position_embeddings
        # from_pretrained(gguf_file=...) insists on accelerate; on the meta device no weight is initialised in vain
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]  # type: ignore[no-untyped-call]
        missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
        tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
        if unexpected or set(missing) - tied:
            raise ValueError(f"{source.name} does not hold exactly the weights of a {config.model_type} model")
        model.tie_weights()
        model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


transformers_logging: Any = _logging


class quiet:
    """Context manager: no progress bars or advisory warnings from transformers inside."""

    def __enter__(self) -> None:
        self._verbosity = transformers_logging.get_verbosity()
        self._bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *exc: object) -> None:
        self._warnings.__exit__(None, None, None)
        transformers_logging.set_verbosity(self._verbosity)
        if self._bars:
            transformers_logging.enable_progress_bar()
