"""Engines that are set up in other ways: each answers from injected KV exactly as the others, and as from text.

A plan of a header alone is exact by construction, so its answer is the text's. What many facts answer is not;
there the embedded engine, which injects the same chunks, is what all set-ups agree with. (vLLM schedules ahead
on CUDA only: on a CPU it takes that setting back.)
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from inferscale.core import Plan, Scope
from tests.engine.vllm.kit import LINES, Desk, start

SCOPE = Scope(user="setups")
SETUPS: dict[str, dict[str, Any]] = {
    "few blocks": {"max_model_len": 512, "num_gpu_blocks_override": 24},
    "two workers": {"tensor_parallel_size": 2},
    "in pieces, layer by layer": {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "long_prefill_token_threshold": 40,
        "connector": {"layerwise": True},
    },
}
CORES = {"two workers": "0|1"}
MANY = [f"- Guest {n} has room {n * 7} and leaves on day {n * 3}.\n" for n in range(9)]


@pytest.fixture(scope="module", params=SETUPS)
def setup(request: pytest.FixtureRequest) -> str:
    """The name of a set-up."""
    return str(request.param)


@pytest.fixture(scope="module")
def desk(setup: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """An engine that is set up in this way."""
    with pytest.MonkeyPatch.context() as patch:
        if setup in CORES:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", CORES[setup])
        engine = start(tiny_model, tmp_path_factory.mktemp("setup"), **SETUPS[setup])
    yield Desk(engine)
    engine.close()


def test_the_engine_is_set_up_as_it_is_called(desk: Desk, setup: str) -> None:
    config = desk.engine.transport._llm.vllm_config  # type: ignore[attr-defined]
    args = dict(SETUPS[setup])
    connector = args.pop("connector", {})
    parts = (config.model_config, config.cache_config, config.parallel_config, config.scheduler_config)
    assert {name: next(getattr(p, name) for p in parts if hasattr(p, name)) for name in args} == args
    assert connector.items() <= config.kv_transfer_config.kv_connector_extra_config.items()


def header(desk: Desk, length: int) -> Plan:
    """A plan of nothing but a header of `length` tokens that no other test has sent."""
    ids = torch.randint(1000, 40000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return desk.plan([], SCOPE, header=ids)


@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65, 128, 200])
def test_a_header_answers_as_prefilled_text(desk: Desk, length: int) -> None:
    plan = header(desk, length)
    injected, text = desk.ask(plan), desk.ask(plan, inject=False)
    assert (injected.injected_tokens, injected.fallback) == (length, None)
    assert injected.token_ids == text.token_ids


@pytest.mark.parametrize("lines", [LINES[:1], LINES, MANY], ids=len)
def test_facts_answer_as_in_every_other_set_up(desk: Desk, lines: list[str]) -> None:
    plan = desk.plan(desk.remember(lines, SCOPE), SCOPE)
    request = desk.request(plan, max_tokens=24)
    ours, embedded = desk.engine.generate(request), desk.engine.encoding.generate(request)
    assert (ours.injected_tokens, ours.fallback) == (len(plan.token_ids), None)
    assert ours.token_ids == embedded.token_ids


def test_a_prompt_that_is_only_partly_injected_is_computed_on(desk: Desk) -> None:
    """Facts without KV follow as text; with prefill in pieces they take several steps."""
    facts = desk.remember(LINES, SCOPE)
    plan = desk.plan(facts, SCOPE)
    request = desk.request(plan, question="Who was it? " * 60, max_tokens=12)
    ours, embedded = desk.engine.generate(request), desk.engine.encoding.generate(request)
    assert (ours.injected_tokens, ours.fallback) == (len(plan.token_ids), None)
    assert ours.token_ids == embedded.token_ids


def test_users_at_once_are_answered_as_alone(desk: Desk, setup: str) -> None:
    """With few blocks some of them are preempted, and their KV is injected a second time."""
    scopes = [Scope(user=f"guest{n}") for n in range(6)]
    plans = [
        desk.plan(desk.remember([f"- Guest {n} is {line[2:]}" for line in MANY], scope), scope)
        for n, scope in enumerate(scopes)
    ]
    requests = [desk.request(plan, max_tokens=110) for plan in plans]
    alone = [desk.engine.encoding.generate(request) for request in requests]
    preempted = preemptions()
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(desk.engine.generate, requests))
    assert [answer.fallback for answer in together] == [None] * len(plans)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert len({answer.token_ids for answer in alone}) == len(plans)
    assert setup != "few blocks" or preemptions() > preempted


def preemptions() -> float:
    """How often vLLM took a request's blocks away, in all engines."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:num_preemptions_total")
