"""The connector's half in vLLM's scheduler: which requests are injected, and how many tokens of each."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferscale.core import token_digest
from inferscale.encode.base import ENCODER_VERSION
from inferscale.engine.vllm.compat import refusal_of
from inferscale.engine.vllm.metadata import Load, Loads
from inferscale.engine.vllm.plans import PlanBoard, PlanRecord
from inferscale.engine.vllm.stats import InjectionStats
from inferscale.errors import PlanRejected
from inferscale.store.format import relative_path

log = logging.getLogger("inferscale.engine.vllm")

PARAMS = "inferscale"
"""Our key in a request's `kv_transfer_params`: {"inferscale": {"plan": "<id>"}}."""


@dataclass(slots=True)
class _Decision:
    """What was found of one request's plan; `reason` is set if it must not be injected."""

    plan: str
    record: PlanRecord | None
    reason: str | None
    told: bool = False


class Planner:
    """Decides for every waiting request, as often as vLLM asks, without side effects until blocks are allocated."""

    def __init__(self, root: Path, model: str, dtype: str, match_registered: bool) -> None:
        """`root` is the folder of the KV files; `model` and `dtype` are what a plan's recipe must name."""
        self.stats = InjectionStats()
        self._root = root
        self._board = PlanBoard(root)
        self._model = model
        self._dtype = dtype
        self._match_registered = match_registered
        self._decisions: dict[str, _Decision] = {}
        self._loads: list[Load] = []

    def matched(self, request: Any, computed: int) -> int:
        """Tokens to inject beyond the first `computed`, which the engine's own prefix cache has."""
        decision = self._decide(request)
        if decision is None or decision.record is None:
            return 0
        # A chunk may go at any time until the worker has read it, so this is asked anew at every step.
        if (missing := self._missing(decision.record)) is not None:
            decision.reason = missing
            return 0
        decision.reason = None
        return max(0, decision.record.tokens - computed)

    def allocated(self, request: Any, blocks: tuple[int, ...], external: int) -> None:
        """vLLM gave the request its blocks (all of them, in order) for `external` tokens to be injected."""
        decision = self._decisions.get(request.request_id)
        if decision is None:
            return
        if external > 0 and decision.record is not None:
            end = decision.record.tokens
            self._loads.append(
                Load(request.request_id, decision.plan, blocks, end - external, end, decision.record.chunks)
            )
            self.stats.add(tokens=external)
        if not decision.told:
            decision.told = True
            self._tell(decision)

    def take_loads(self) -> Loads:
        """The loads of this step."""
        loads, self._loads = Loads(self._loads), []
        return loads

    def finished(self, request: Any) -> None:
        """Forget the request, whatever became of it."""
        self._decisions.pop(request.request_id, None)

    def _tell(self, decision: _Decision) -> None:
        """Count the decision once, and leave the reason where the one who planned looks for it."""
        if decision.reason is None:
            self.stats.add(hits=1)
            return
        log.warning("plan not injected (%s); the prompt is prefilled as text", decision.reason)
        self.stats.refuse(decision.reason)
        self._board.note(decision.plan, decision.reason)

    def _decide(self, request: Any) -> _Decision | None:
        known = self._decisions.get(request.request_id)
        if known is not None:
            return known
        plan = self._named(request)
        if plan is None:
            return None
        try:
            decision = _Decision(plan, self._verified(plan, request), None)
        except PlanRejected as error:
            decision = _Decision(plan, None, error.reason)
        self._decisions[request.request_id] = decision
        return decision

    def _named(self, request: Any) -> str | None:
        """The plan that the request names, "" if it names one in a way that cannot be read, None if it names none."""
        params = request.kv_transfer_params
        if isinstance(params, dict) and PARAMS in params:
            ours = params[PARAMS]
            plan = ours.get("plan") if isinstance(ours, dict) else None
            return plan if isinstance(plan, str) else ""
        salt: str | None = request.cache_salt
        if self._match_registered and salt is not None and self._board.has(salt):
            return salt
        return None

    def _verified(self, plan: str, request: Any) -> PlanRecord:
        """The plan's record if this request may be answered from it (invariants 2 and 4), else PlanRejected."""
        if (reason := refusal_of(request)) is not None:
            raise PlanRejected(reason, "Requests of this kind are prefilled as text.")
        record = self._board.read(plan)
        recipe = record.recipe
        if (recipe.model, recipe.dtype, recipe.encoder_version) != (self._model, self._dtype, ENCODER_VERSION):
            raise PlanRejected("recipe_mismatch", "The plan was made for another model or dtype.")
        if request.cache_salt != record.salt:
            # Its blocks would be found by anybody who sends the same tokens.
            raise PlanRejected("unsalted", "The request's cache_salt is not its plan's.")
        prompt = request.prompt_token_ids
        if len(prompt) <= record.tokens:
            raise PlanRejected("prompt_mismatch", "The prompt is not longer than its plan.")
        for chunk in record.chunks:
            if token_digest(prompt[chunk.start : chunk.start + chunk.length]) != chunk.key.tokens:
                raise PlanRejected("prompt_mismatch", "The prompt does not begin with its plan's tokens.")
        return record

    def _missing(self, record: PlanRecord) -> str | None:
        """ "missing_chunk" if a chunk's file is not there."""
        root = str(self._root)
        there = all(os.path.exists(f"{root}/{relative_path(chunk.key)}") for chunk in record.chunks)
        return None if there else "missing_chunk"
