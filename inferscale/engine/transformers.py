"""The embedded engine: a transformers model in this process, CPU or CUDA, driven through `LayerwiseDecoder`."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
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
from inferscale.engine.base import Engine, GenerationStream, Request, placement
from inferscale.engine.prompt import INSTRUCTION, PromptFormat
from inferscale.engine.run import Run, room_for
from inferscale.errors import PlanRejected
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
        self.ends = _end_ids(tokenizer, generation)
        """Tokens that end an answer."""

    @classmethod
    def load(
        cls, name_or_path: str | Path, *, dtype: str | None, device: str | None, instruction: str
    ) -> TransformersEngine:
        """See `Engine.from_pretrained`."""
        place_on, kind = placement(device, dtype)
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
        run = _Run(self, request, room_for(request, self.spec))
        return GenerationStream(run.pieces(), run.finish)

    def fetch(self, plan: Plan, prompt_ids: tuple[int, ...], store: KVStore | None) -> list[ChunkKV]:
        """The plan's verified KV, header first; PlanRejected if anything of it is not as planned.

        Whatever the header is, its KV is exact: it is computed here if it is seen for the first time.
        """
        check_prompt(plan, prompt_ids, self.recipes)
        chunks = fetch(plan, store, self.spec)
        return [self.headers.get(plan.token_ids[: plan.header_tokens]), *chunks]


class _Run(Run):
    """One generation, decoded here."""

    def __init__(self, engine: TransformersEngine, request: Request, max_tokens: int) -> None:
        super().__init__(request, engine.prompt.tokenizer, engine.ends)
        self._engine = engine
        self._max_tokens = max_tokens
        self._buffer = KVBuffer.for_decoder(engine.decoder, len(request.prompt_ids) + max_tokens)

    def tokens(self, began: float) -> Generator[int]:
        decoder = self._engine.decoder
        sampler = Sampler(self.request.sampling, decoder.device)
        self._inject()
        composed = time.perf_counter()
        hidden = self._extend(self.request.prompt_ids[self.injected :])
        token = sampler.pick(decoder.logits(hidden[-1:])[0])
        self.first_token(began, composed)
        yield token
        for _ in range(self._max_tokens - 1):
            token = sampler.pick(decoder.logits(self._extend((token,)))[0])
            yield token

    def _inject(self) -> None:
        """Place the plan's KV, or note why not; then the whole prompt is prefilled."""
        plan = self.request.plan
        if plan is None:
            return
        try:
            parts = self._engine.fetch(plan, self.request.prompt_ids, self.request.store)
        except PlanRejected as error:
            self.fallback = error.reason
            log.warning("plan not injected (%s): %s The prompt is prefilled as text.", error.reason, error)
            return
        place(self._engine.decoder, parts, self._buffer)
        self.injected = self._buffer.length

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
