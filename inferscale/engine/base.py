"""The contract of an engine: prompt tokens and a plan in, streamed text out."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from inferscale.config import EncodeConfig, Sampling, VllmConfig, from_dict
from inferscale.core import ModelSpec, Plan, Recipe, RecipeId, token_digest
from inferscale.encode.base import ENCODER_VERSION, Encoder
from inferscale.engine.prompt import INSTRUCTION, PromptFormat
from inferscale.errors import ConfigError
from inferscale.store.base import KVStore

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. With a plan, the prompt must begin with the plan's tokens; without one it is prefilled whole.

    `store` holds the plan's chunks: it belongs to the request, so any number of memories share an engine.
    """

    prompt_ids: tuple[int, ...]
    plan: Plan | None = None
    sampling: Sampling = field(default_factory=Sampling)
    store: KVStore | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer.

    `finish_reason` is "stop", "length", or "closed" if the stream was closed before its end.
    `fallback` is the reason why a plan was not injected, None if it was or there was none. `timings`
    are seconds: compose (fetch, verify, a header seen for the first time, rotate), prefill,
    first_token (all until the first token is there), decode (the rest).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    injected_tokens: int
    fallback: str | None
    timings: dict[str, float]


class Pieces(Iterator[str]):
    """Pieces of text that a generator makes. `close` abandons the rest; leaving a `with` does it too."""

    def __init__(self, pieces: Generator[str]) -> None:
        self._pieces = pieces
        self._reading = threading.Lock()
        self._closed = False

    def __next__(self) -> str:
        try:
            with self._reading:
                return next(self._pieces)
        finally:
            if self._closed:
                self._end()

    def close(self) -> None:
        """Let go of what the rest would need. Idempotent, from any thread: never waits for a piece being made."""
        self._closed = True
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _end(self) -> None:
        """Close the generator, unless a thread is inside: that one does it when it comes out."""
        if self._reading.acquire(blocking=False):
            try:
                self._pieces.close()
            finally:
                self._reading.release()


class GenerationStream(Pieces):
    """Pieces of text as they are decoded; `result` once they are exhausted.

    `close` ends the generator of an engine: its `finally` stops the generation. A generator that was
    never started has nothing to stop, so an engine starts the work inside it.
    """

    def __init__(self, pieces: Generator[str], finish: Callable[[], Generation]) -> None:
        super().__init__(pieces)
        self._finish = finish

    @property
    def result(self) -> Generation:
        """The finished answer; reads the rest of the stream first. After `close`, what there was until then."""
        for _ in self:
            pass
        return self._finish()


class Engine(ABC):
    """A model that can answer from injected KV. Methods may be called from any thread unless they say otherwise."""

    spec: ModelSpec
    prompt: PromptFormat
    device: str
    recipes: set[RecipeId]
    """Recipes that this engine can make and therefore trusts; see `recipe`."""

    @staticmethod
    def from_pretrained(
        name_or_path: str | Path,
        *,
        engine: str = "transformers",
        dtype: str | None = None,
        device: str | None = None,
        instruction: str = INSTRUCTION,
        vllm: VllmConfig | Mapping[str, Any] | None = None,
    ) -> Engine:
        """Load a model: a folder, a cached or online hub id, or a packaged demo model.

        `engine` is "transformers" (everything in this process) or "vllm", which `vllm` configures: in
        this process's children, or a running server (`{"url": "http://localhost:8000"}`). `dtype` is
        "float32" or "bfloat16" (default: float32 on a CPU, bfloat16 elsewhere), `device` a torch
        device (default: CUDA if there is one); with vLLM, `device` is where memories are encoded.
        Raises ModelNotFound, ModelDamaged or UnsupportedModel, each with one sentence that says what
        to do; with vLLM also ConfigError and EngineUnavailable.
        """
        if engine not in ("transformers", "vllm"):
            raise ConfigError(f'Unknown engine {engine!r}; choose "transformers" or "vllm".')
        if engine == "vllm":
            from inferscale.engine.vllm.engine import VllmEngine

            config = vllm if isinstance(vllm, VllmConfig) else from_dict(VllmConfig, vllm or {})
            return VllmEngine.load(name_or_path, dtype=dtype, device=device, instruction=instruction, config=config)
        if vllm is not None:
            raise ConfigError('vllm=... configures engine="vllm"; name that engine, or leave it out.')
        from inferscale.engine.transformers import TransformersEngine

        return TransformersEngine.load(name_or_path, dtype=dtype, device=device, instruction=instruction)

    @abstractmethod
    def stream(self, request: Request) -> GenerationStream:
        """Start a generation. A plan that fails verification is prefilled as text, and `fallback` says why.

        Raises PromptTooLong if no token could be generated.
        """

    def generate(self, request: Request) -> Generation:
        """The whole answer at once; see `stream`."""
        return self.stream(request).result

    @abstractmethod
    def encoder(self, config: EncodeConfig) -> Encoder:
        """An encoder that makes KV for this engine; use it from one thread at a time."""

    def recipe(self, config: EncodeConfig) -> Recipe:
        """Names the KV that `encoder(config)` makes; from now on plans of this recipe may be injected."""
        recipe = Recipe(
            model=self.spec.fingerprint,
            dtype=self.spec.dtype,
            tokenizer=self.prompt.digest,
            header=token_digest(self.prompt.header_ids),
            window=config.window,
            companions=config.companions,
            mode=config.mode if config.window else "exact",
            encoder_version=ENCODER_VERSION,
        )
        self.recipes.add(recipe.id)
        return recipe

    def health(self) -> str | None:
        """None if requests can be answered now, else one sentence that says why not. Never waits."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of the model; the engine is not used afterwards. Idempotent."""


def placement(device: str | None, dtype: str | None) -> tuple[torch.device, str]:
    """Device and dtype that are meant by what the caller said of them. Raises ConfigError."""
    import torch

    try:
        place_on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"Unknown device {device!r}; pass cpu, cuda or cuda:N.") from error
    kind = dtype or default_dtype(place_on)
    if kind not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype must be float32 or bfloat16, got {kind!r}.")
    return place_on, kind


def default_dtype(device: torch.device) -> str:
    """float32 on a CPU (few have fast bfloat16), bfloat16 elsewhere."""
    return "float32" if device.type == "cpu" else "bfloat16"
