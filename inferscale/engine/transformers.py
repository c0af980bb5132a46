"""The embedded engine: a transformers model in this process, CPU or CUDA, driven through `LayerwiseDecoder`."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inferscale.compose import check_prompt, fetch, place
from inferscale.config import EncodeConfig, Sampling
from inferscale.core import ChunkKV, Plan, RecipeId
from inferscale.decoder.forward import KVBuffer, extend
from inferscale.decoder.transformers import TransformersDecoder, load_decoder, load_tokenizer
from inferscale.encode import HeaderCache, create_encoder
from inferscale.encode.base import Encoder
from inferscale.engine.base import Engine, Generation, GenerationStream, Request, default_dtype
from inferscale.engine.prompt import INSTRUCTION, PromptFormat
from inferscale.engine.text import TextStream
from inferscale.errors import ConfigError, PlanRejected, PromptTooLong
from inferscale.models import fingerprint, resolve_model
from inferscale.store.base import KVStore

log = logging.getLogger("inferscale.engine")


class TransformersEngine(Engine):
    """Prefills, injects and decodes with one model. Generations may run at the same time in several threads."""

    def __init__(self, decoder: TransformersDecoder, tokenizer: Any, instruction: str = INSTRUCTION) -> None:
        self.decoder = decoder
        self.spec = decoder.spec
        self.prompt = PromptFormat(tokenizer, instruction)
        self.headers = HeaderCache(decoder)
        self.header = self.headers.get(self.prompt.header_ids)
        self.device = str(decoder.device)
        self.recipes: set[RecipeId] = set()
        generation = getattr(decoder.model, "generation_config", None)
        self._ends = _end_ids(tokenizer, generation)

    @classmethod
    def load(
        cls, name_or_path: str | Path, *, dtype: str | None, device: str | None, instruction: str
    ) -> TransformersEngine:
        """See `Engine.from_pretrained`."""
        try:
            place_on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError as error:
            raise ConfigError(f"Unknown device {device!r}; pass cpu, cuda or cuda:N.") from error
        kind = dtype or default_dtype(place_on)
        if kind not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype must be float32 or bfloat16, got {kind!r}.")
        folder = resolve_model(name_or_path)
        decoder = load_decoder(
            folder.path,
            name=folder.name,
            fingerprint=fingerprint(folder.path),
            dtype=getattr(torch, kind),
            device=str(place_on),
        )
        return cls(decoder, load_tokenizer(folder.path), instruction)

    def encoder(self, config: EncodeConfig) -> Encoder:
        return create_encoder(self.decoder, self.header, config)

    def close(self) -> None:
        self.__dict__.pop("decoder", None)

    def stream(self, request: Request) -> GenerationStream:
        room = self.spec.max_positions - len(request.prompt_ids)
        if room < 1:
            raise PromptTooLong(
                f"The prompt has {len(request.prompt_ids)} tokens; this model's context holds "
                f"{self.spec.max_positions}, one of them for the answer. Shorten the message or use fewer memories."
            )
        run = _Run(self, request, min(request.sampling.max_tokens, room))
        return GenerationStream(run.pieces(), run.finish)

    def fetch(self, plan: Plan, prompt_ids: tuple[int, ...], store: KVStore | None) -> list[ChunkKV]:
        """The plan's verified KV, header first; PlanRejected if anything of it is not as planned.

        Whatever the header is, its KV is exact: it is computed here if it is seen for the first time.
        """
        check_prompt(plan, prompt_ids, self.recipes)
        chunks = fetch(plan, store, self.spec)
        return [self.headers.get(plan.token_ids[: plan.header_tokens]), *chunks]


class _Run:
    """One generation from request to finished answer."""

    def __init__(self, engine: TransformersEngine, request: Request, max_tokens: int) -> None:
        self._engine = engine
        self._request = request
        self._max_tokens = max_tokens
        self._buffer = KVBuffer.for_decoder(engine.decoder, len(request.prompt_ids) + max_tokens)
        self._token_ids: list[int] = []
        self._text = ""
        self._finish_reason = "closed"
        self._fallback: str | None = None
        self._injected = 0
        self._timings = {"compose": 0.0, "prefill": 0.0, "first_token": 0.0, "decode": 0.0}

    def finish(self) -> Generation:
        return Generation(
            text=self._text,
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            prompt_tokens=len(self._request.prompt_ids),
            injected_tokens=self._injected,
            fallback=self._fallback,
            timings=self._timings,
        )

    def pieces(self) -> Generator[str]:
        began = time.perf_counter()
        try:
            yield from self._decoded(began)
        finally:
            self._timings["decode"] = time.perf_counter() - began - self._timings["first_token"]

    def _decoded(self, began: float) -> Iterator[str]:
        text = TextStream(self._engine.prompt.tokenizer, self._request.sampling.stop)
        for token in self._tokens(began):
            if token in self._engine._ends:
                self._finish_reason = "stop"
                break
            self._token_ids.append(token)
            if piece := text.push(token):
                self._text += piece
                yield piece
            if text.stopped:
                self._finish_reason = "stop"
                break
        else:
            self._finish_reason = "length"
        if rest := text.flush():
            self._text += rest
            yield rest

    def _tokens(self, began: float) -> Iterator[int]:
        decoder = self._engine.decoder
        sampler = Sampler(self._request.sampling, decoder.device)
        self._inject()
        composed = time.perf_counter()
        hidden = self._extend(self._request.prompt_ids[self._injected :])
        token = sampler.pick(decoder.logits(hidden[-1:])[0])
        now = time.perf_counter()
        self._timings |= {"compose": composed - began, "prefill": now - composed, "first_token": now - began}
        yield token
        for _ in range(self._max_tokens - 1):
            token = sampler.pick(decoder.logits(self._extend((token,)))[0])
            yield token

    def _inject(self) -> None:
        """Place the plan's KV, or note why not; then the whole prompt is prefilled."""
        plan = self._request.plan
        if plan is None:
            return
        try:
            parts = self._engine.fetch(plan, self._request.prompt_ids, self._request.store)
        except PlanRejected as error:
            self._fallback = error.reason
            log.warning("plan not injected (%s): %s The prompt is prefilled as text.", error.reason, error)
            return
        place(self._engine.decoder, parts, self._buffer)
        self._injected = self._buffer.length

    def _extend(self, token_ids: tuple[int, ...]) -> Tensor:
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._engine.decoder.device)
        return extend(self._engine.decoder, ids, self._buffer)


class Sampler:
    """Greedy, or nucleus sampling at a temperature."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._generator = torch.Generator(device=device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def pick(self, logits: Tensor) -> int:
        """One token id from logits [vocab]."""
        if self._sampling.temperature < 1e-5:  # dividing by less overflows, and gives the same token
            return int(logits.argmax())
        ordered, ids = (logits / self._sampling.temperature).softmax(-1).sort(descending=True)
        # Keep the smallest set that reaches top_p: everything before which less than top_p is covered.
        kept = torch.where(ordered.cumsum(0) - ordered < self._sampling.top_p, ordered, 0.0)
        return int(ids[torch.multinomial(kept, 1, generator=self._generator)])


def _end_ids(tokenizer: Any, generation: Any) -> frozenset[int]:
    """Tokens that end an answer, from the generation config and the tokenizer."""
    ends: set[int] = set()
    for value in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        ends.update(value if isinstance(value, list) else () if value is None else (value,))
    return frozenset(ends)
