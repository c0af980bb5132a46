"""Steps scheduled ahead of their results, as vLLM does on CUDA by default and never on a CPU.

vLLM's own asynchronous scheduler, with our connector in it, is driven here step by step; the results of the
steps are written down instead of computed.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from inferscale.compose import PlanFact, build_plan
from inferscale.config import VllmConfig
from inferscale.core import ChunkKey, ChunkKV, FactId, Recipe, Scope, token_digest
from inferscale.encode.base import ENCODER_VERSION
from inferscale.engine.vllm.launch import engine_args
from inferscale.engine.vllm.plans import PlanBoard, header_key, record_of
from inferscale.models import fingerprint, resolve_model
from inferscale.store import DiskStore
from tests.engine.vllm.kit import ARGS

with warnings.catch_warnings():  # of what vLLM imports
    warnings.simplefilter("ignore")
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import FinishReason
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 32
SCOPE = Scope(user="ahead")
HEADER, FACT = tuple(range(100, 140)), tuple(range(200, 260))
TOKENS = len(HEADER) + len(FACT)
WRONG, RIGHT = 13, 7


class Ahead:
    """A scheduler, and requests with one plan."""

    def __init__(self, model: Path, store: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args = engine_args(resolve_model(model), "float32", VllmConfig(store=str(store), args=ARGS))
            config = EngineArgs(**args).create_engine_config()
            config.scheduler_config.async_scheduling = True
            spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
            cache = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], spec)])
            config.cache_config.num_gpu_blocks = cache.num_blocks
            self.scheduler = AsyncScheduler(config, cache, StructuredOutputManager(config), BLOCK, BLOCK)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        recipe = Recipe(fingerprint(model), "float32", "t" * 64, "h" * 64, 0, 0, "exact", ENCODER_VERSION)
        kv = DiskStore(store / "kv", budget_bytes=1 << 30)
        key = ChunkKey(SCOPE.id, FactId("fact"), recipe.id, token_digest(FACT))
        for name, tokens in ((header_key(recipe, HEADER), HEADER), (key, FACT)):
            values = torch.randn(3, len(tokens), 2, 32)
            kv.put_many([(name, ChunkKV(tokens, values, values.clone()))])
        self._plan = build_plan(SCOPE, recipe.id, HEADER, [PlanFact(FACT, key)])
        record = record_of(self._plan, recipe, kv.folder)
        PlanBoard(kv.folder).publish(self._plan.id, record)
        self._salt = record.salt

    def add(self, name: str) -> None:
        """A request with the plan."""
        params = SamplingParams(
            max_tokens=5, extra_args={"kv_transfer_params": {"inferscale": {"plan": self._plan.id}}}
        )
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=[*self._plan.token_ids, 300, 301, 302],
                sampling_params=params,
                pooling_params=None,
                cache_salt=self._salt,
                block_hasher=self._hasher,
            )
        )

    def result(self, step: SchedulerOutput, token: int, failed: bool = False) -> dict[str, tuple[list[int], object]]:
        """Tell the scheduler that every request got `token`; what it tells the clients: tokens and how it ended."""
        names = list(step.num_scheduled_tokens)
        loads = step.kv_connector_metadata.loads  # type: ignore[union-attr]
        invalid = {block for load in loads for block in load.blocks[load.start // BLOCK :]} if failed else set()
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[token] for _ in names],
            kv_connector_output=KVConnectorOutput(invalid_block_ids=invalid),
        )
        told = self.scheduler.update_from_output(step, output)
        return {
            each.request_id: (list(each.new_token_ids), each.finish_reason)
            for client in told.values()
            for each in client.outputs
        }


@pytest.fixture
def ahead(tiny_model: Path, tmp_path: Path) -> Ahead:
    return Ahead(tiny_model, tmp_path)


def test_a_request_is_decoded_from_its_plan_with_a_step_always_ahead(ahead: Ahead) -> None:
    ahead.add("a")
    steps = [ahead.scheduler.schedule()]
    assert steps[0].num_scheduled_tokens == {"a": 3}
    tokens, end = [], None
    while end is None:
        steps.append(ahead.scheduler.schedule())
        got, end = ahead.result(steps.pop(0), RIGHT)["a"]
        tokens += got
    assert (tokens, end) == ([RIGHT] * 5, FinishReason.LENGTH)


def test_a_failed_load_ends_its_request_before_a_token_and_leaves_nothing_to_find(ahead: Ahead) -> None:
    ahead.add("a")
    first, second = ahead.scheduler.schedule(), ahead.scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 1}, "decoding what the failed step will sample is under way already"
    assert ahead.result(first, WRONG, failed=True) == {"a": ([], FinishReason.ERROR)}
    assert ahead.result(second, WRONG) == {}
    ahead.add("again")
    step = ahead.scheduler.schedule()
    (load,) = step.kv_connector_metadata.loads  # type: ignore[union-attr]
    assert (load.request, load.start, load.end) == ("again", 0, TOKENS)
    assert ahead.result(step, RIGHT) == {"again": ([RIGHT], None)}


@pytest.mark.parametrize("late", [False, True])
def test_who_found_the_blocks_of_a_failed_load_ends_too(ahead: Ahead, late: bool) -> None:
    """They are in the prefix cache from the moment they are allotted, before anything is written into them."""
    ahead.add("a")
    if not late:
        ahead.add("b")
    first = ahead.scheduler.schedule()
    if late:
        ahead.add("b")
    second = ahead.scheduler.schedule()
    ended = ahead.result(first, WRONG, failed=True)
    ended |= ahead.result(second, WRONG)
    assert ended == dict.fromkeys("ab", ([], FinishReason.ERROR))
