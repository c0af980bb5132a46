"""What the tests of vLLM share: engines of several kinds, and facts encoded into the store that an engine reads."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inferscale.compose import PlanFact, build_plan
from inferscale.config import EncodeConfig, Sampling, VllmConfig
from inferscale.core import ChunkKey, FactId, Plan, Scope, token_digest
from inferscale.encode import EncodeJob
from inferscale.engine import Message, Request
from inferscale.engine.base import Generation
from inferscale.engine.vllm.engine import VllmEngine
from inferscale.engine.vllm.transport import Call
from inferscale.store import DiskStore

CONFIG = EncodeConfig(companions=0)
LINES = ["- Rex is a collie.\n", "- Tom lives in Lisbon.\n", "- Ana plays the cello.\n", "- Mia was born in 1990.\n"]
QUESTION = "Which breed is Rex?"

ARGS = {
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": 32,
    "max_num_seqs": 16,
    "disable_log_stats": False,
}
"""Of every engine here: starts in seconds, and has many block boundaries."""


def start(model: Path, store: Path, dtype: str = "float32", connector: Any = None, **args: Any) -> VllmEngine:
    """An engine of `model` that reads KV from `store`; vLLM's own warnings at start are its own affair."""
    config = VllmConfig(store=str(store), args={**ARGS, **args}, connector=connector or {}, start_seconds=240)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return VllmEngine.load(model, dtype=dtype, device="cpu", instruction="Answer from the memories.", config=config)


class Desk:
    """Encodes facts for one engine and plans requests from them."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.store = DiskStore(engine.root, budget_bytes=1 << 40)
        self.recipe = engine.recipe(CONFIG).id
        engine.encoding.recipe(CONFIG)  # so that it injects the same plans

    def remember(self, lines: Sequence[str], scope: Scope) -> list[PlanFact]:
        """Encode lines behind the header alone, store them, in order."""
        return self.remember_ids([self.engine.prompt.fact_ids(line) for line in lines], scope)

    def remember_ids(self, lines: Sequence[Sequence[int]], scope: Scope) -> list[PlanFact]:
        """The same, from token ids."""
        facts: dict[int, PlanFact] = {}
        jobs = [EncodeJob(tuple(line)) for line in lines]
        for index, kv in (fact for results in self.engine.encoder(CONFIG).encode(jobs) for fact in results):
            digest = token_digest(kv.token_ids)
            key = ChunkKey(scope.id, FactId(f"f{digest[:12]}"), self.recipe, digest)
            self.store.put_many([(key, kv)])
            facts[index] = PlanFact(kv.token_ids, key)
        return [facts[index] for index in range(len(jobs))]

    def plan(self, facts: Sequence[PlanFact], scope: Scope, header: Sequence[int] | None = None) -> Plan:
        return build_plan(scope, self.recipe, self.engine.prompt.header_ids if header is None else header, facts)

    def request(self, plan: Plan, question: str = QUESTION, max_tokens: int = 12, inject: bool = True) -> Request:
        """The plan's prompt and a question; with `inject` its KV, else the very same tokens as text."""
        tail = self.engine.prompt.layout([Message("user", question)])[1]
        sampling = Sampling(max_tokens=max_tokens)
        return Request((*plan.prompt_ids, *tail), plan if inject else None, sampling, self.store)

    def ask(self, plan: Plan, question: str = QUESTION, max_tokens: int = 12, inject: bool = True) -> Generation:
        return self.engine.generate(self.request(plan, question, max_tokens, inject))

    def raw(self, request: Request, *, plan: str | None = None, salt: str | None = None) -> tuple[list[int], int]:
        """New tokens and how many of the prompt were not computed, straight from vLLM, with any plan id and salt."""
        call = Call(request.prompt_ids, request.sampling, request.sampling.max_tokens, (), plan, salt)
        outputs = list(self.engine.transport.generate(call))
        cached = [output.cached for output in outputs if output.cached is not None]
        return [token for output in outputs for token in output.ids], cached[-1]
