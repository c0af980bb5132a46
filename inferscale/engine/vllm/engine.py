"""Answers from stock vLLM. KV is made here, by the same model through transformers, and injected there."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from inferscale.compose import check_prompt
from inferscale.config import EncodeConfig, VllmConfig
from inferscale.core import Plan, Recipe, RecipeId
from inferscale.encode.base import Encoder
from inferscale.engine.base import Engine, GenerationStream, Request
from inferscale.engine.run import Run, room_for
from inferscale.engine.transformers import TransformersEngine
from inferscale.engine.vllm.http import HttpTransport
from inferscale.engine.vllm.inprocess import InProcessTransport
from inferscale.engine.vllm.plans import PlanBoard, header_key, record_of
from inferscale.engine.vllm.transport import Call, CallFailed, Transport
from inferscale.errors import ConfigError, PlanRejected, StoreError
from inferscale.models import resolve_model

log = logging.getLogger("inferscale.engine")

SWEEP_SECONDS = 60.0


class VllmEngine(Engine):
    """vLLM answers, in this process's children or at a URL; a transformers engine beside it encodes."""

    def __init__(self, encoding: TransformersEngine, transport: Transport, store: Path) -> None:
        """`store` is the folder of the memories that vLLM reads KV from; both engines must have loaded one model."""
        self.encoding = encoding
        self.transport = transport
        self.root = store / "kv"
        self.prompt = encoding.prompt
        self.device = encoding.device
        self.spec = replace(encoding.spec, max_positions=min(encoding.spec.max_positions, transport.max_model_len))
        self.recipes: set[RecipeId] = set()
        self._recipes: dict[RecipeId, Recipe] = {}
        self._swept = 0.0
        self.board = PlanBoard(self.root)

    @classmethod
    def load(
        cls, name_or_path: str | Path, *, dtype: str | None, device: str | None, instruction: str, config: VllmConfig
    ) -> VllmEngine:
        """See `Engine.from_pretrained`; `device` is where KV is encoded."""
        folder = resolve_model(name_or_path)
        encoding = TransformersEngine.load(name_or_path, dtype=dtype, device=device, instruction=instruction)
        try:
            transport: Transport
            if config.url is None:
                transport = InProcessTransport(folder, encoding.spec.dtype, config)
            else:
                transport = HttpTransport(config)
        except BaseException:
            encoding.close()
            raise
        return cls(encoding, transport, Path(config.store))

    def encoder(self, config: EncodeConfig) -> Encoder:
        return self.encoding.encoder(config)

    def recipe(self, config: EncodeConfig) -> Recipe:
        recipe = super().recipe(config)
        self._recipes[recipe.id] = recipe
        return recipe

    def stream(self, request: Request) -> GenerationStream:
        self._require_same_store(request)
        run = _VllmRun(self, request, room_for(request, self.spec))
        return GenerationStream(run.pieces(), run.finish)

    def health(self) -> str | None:
        return self.transport.health()

    def close(self) -> None:
        self.transport.close()
        self.encoding.close()

    def publish(self, request: Request, plan: Plan) -> str:
        """Register the plan where vLLM's processes look for it; its salt. PlanRejected if it must not be injected."""
        check_prompt(plan, request.prompt_ids, self.recipes)
        recipe = self._recipes[plan.recipe]
        header = plan.token_ids[: plan.header_tokens]
        key = header_key(recipe, header)
        try:
            if request.store is not None and not request.store.contains(key):
                request.store.put_many([(key, self.encoding.headers.get(header))])
            record = record_of(plan, recipe, self.root)
            self._sweep()
            self.board.publish(plan.id, record)
        except (OSError, StoreError) as error:
            raise PlanRejected("store_failed", f"The store cannot be written ({error}).") from error
        return record.salt

    def _require_same_store(self, request: Request) -> None:
        folder = None if request.store is None or request.plan is None else request.store.folder
        if folder is not None and folder.resolve() != self.root.resolve():
            raise ConfigError(
                f"vLLM reads KV from {self.root.parent}, and these memories lie in {folder.parent}; pass their folder "
                "as the engine's store, or the engine's store as Memory's path."
            )

    def _sweep(self) -> None:
        if time.monotonic() - self._swept > SWEEP_SECONDS:
            self._swept = time.monotonic()
            self.board.sweep()


class _VllmRun(Run):
    """One generation, decoded by vLLM."""

    def __init__(self, engine: VllmEngine, request: Request, max_tokens: int) -> None:
        super().__init__(request, engine.prompt.tokenizer, engine.encoding.ends)
        self._engine = engine
        self._call = Call(request.prompt_ids, request.sampling, max_tokens, tuple(sorted(engine.encoding.ends)))
        self._started = False
        self._cached: int | None = None

    def tokens(self, began: float) -> Generator[int]:
        plan = self.request.plan
        call = self._call if plan is None else self._planned(plan)
        try:
            yield from self._answer(call, began)
            return
        except CallFailed:
            if call.plan is None:
                raise
            self.fallback = "load_failed"
        finally:
            if plan is not None and call.plan is not None:
                self._settle(plan)
        log.warning("plan not injected (%s); the prompt is prefilled as text", self.fallback)
        yield from self._answer(self._rest(), began)

    def _answer(self, call: Call, began: float) -> Generator[int]:
        """The tokens of one call."""
        composed = time.perf_counter()
        last: tuple[int, ...] = ()
        for tokens in self._engine.transport.generate(call):
            self._cached = tokens.cached if tokens.cached is not None else self._cached
            if tokens.ids and not self._started:
                self._started = True
                self.first_token(began, composed)
            # The token that ends the answer waits for the end of vLLM's own stream: nothing is cut off.
            last = tuple(token for token in tokens.ids if token in call.ends) or last
            yield from (token for token in tokens.ids if token not in call.ends)
        yield from last

    def _rest(self) -> Call:
        """The plain call for what is not there yet: a preempted request may lose its KV in mid-answer."""
        there = tuple(self._token_ids)
        return replace(
            self._call, prompt_ids=self._call.prompt_ids + there, max_tokens=self._call.max_tokens - len(there)
        )

    def _planned(self, plan: Plan) -> Call:
        """The call that injects the plan, or the plain one."""
        try:
            salt = self._engine.publish(self.request, plan)
        except PlanRejected as error:
            self.fallback = error.reason
            log.warning("plan not injected (%s): %s The prompt is prefilled as text.", error.reason, error)
            return self._call
        return replace(self._call, plan=plan.id, salt=salt)

    def _settle(self, plan: Plan) -> None:
        """Learn what became of the plan, and take its record away."""
        board = self._engine.board
        self.fallback = board.noted(plan.id) or self.fallback
        if self.fallback is None and self._cached is not None and self._cached < len(plan.token_ids):
            self.fallback = "not_injected"
            log.warning("vLLM did not look for the plan; does it read KV from %s?", self._engine.root)
        self.injected = len(plan.token_ids) if self._started and self.fallback is None else 0
        board.retire(plan.id)
