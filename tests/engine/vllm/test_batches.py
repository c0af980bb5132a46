"""Many requests at once, several answers to one, and requests that end early or leave little to compute."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from inferscale.core import Plan, Scope
from inferscale.engine.base import Request
from inferscale.engine.vllm.plans import FOLDER
from tests.engine.vllm.kit import Desk

USERS = 16
BREEDS = ["collie", "beagle", "poodle", "husky"]
TOWNS = ["Lisbon", "Oslo", "Quito", "Cairo"]


def memory(user: int) -> list[str]:
    """Two facts that no other user has, of a length of their own."""
    return [
        f"- Rex is a {BREEDS[user % 4]} from {TOWNS[user // 4]}{' and very old' * (user % 5)}.\n",
        f"- The number of the user's house is {100 + 7 * user}.\n",
    ]


def planned(desk: Desk, user: str, lines: list[str]) -> Plan:
    scope = Scope(user=user)
    return desk.plan(desk.remember(lines, scope), scope)


def run(desk: Desk, work: Callable[[Any], Any]) -> Any:
    """The result of a coroutine that `work` makes of vLLM's own engine."""
    transport: Any = desk.engine.transport
    return asyncio.run_coroutine_threadsafe(work(transport._llm), transport._loop).result(120)


def forget_blocks(desk: Desk) -> None:
    """Empty vLLM's prefix cache; it refuses while a request runs."""
    until = time.monotonic() + 10
    while not run(desk, lambda llm: llm.reset_prefix_cache()):
        assert time.monotonic() < until
        time.sleep(0.05)


def final(desk: Desk, request: Request, plan: Plan, **params: Any) -> Any:
    """vLLM's own last output for a request with a published plan."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        max_tokens=request.sampling.max_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=False,
        extra_args={"kv_transfer_params": {"inferscale": {"plan": plan.id}}},
        **params,
    )
    prompt = {"prompt_token_ids": list(request.prompt_ids), "cache_salt": desk.engine.publish(request, plan)}

    async def work(llm: Any) -> Any:
        (output,) = [output async for output in llm.generate(prompt, sampling, uuid4().hex)]
        return output

    return run(desk, work)


@pytest.fixture(scope="module")
def plans(desk: Desk) -> list[Plan]:
    """A plan of every user."""
    return [planned(desk, f"batch{user}", memory(user)) for user in range(USERS)]


def test_users_at_once_get_what_each_gets_alone(desk: Desk, plans: list[Plan]) -> None:
    texts = [desk.request(plan, inject=False) for plan in plans[::4]]
    requests = [desk.request(plan) for plan in plans]
    mixed = [*requests[:8], *texts, *requests[8:]]
    with ThreadPoolExecutor(len(mixed)) as pool:
        together = list(pool.map(desk.engine.generate, mixed))
    forget_blocks(desk)
    alone = [desk.engine.generate(request) for request in mixed]
    assert [answer.fallback for answer in together] == [None] * len(mixed)
    expected = [0 if request.plan is None else len(request.plan.token_ids) for request in mixed]
    assert [answer.injected_tokens for answer in together] == expected
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert len({answer.token_ids for answer in together}) >= len(BREEDS), "the answers do not tell the users apart"


def test_several_answers_to_one_plan_are_each_injected(desk: Desk, plans: list[Plan]) -> None:
    plan = plans[0]
    expected = desk.engine.encoding.generate(desk.request(plan)).token_ids
    forget_blocks(desk)
    output = final(desk, desk.request(plan), plan, n=3, temperature=1.0, top_k=1)
    assert [tuple(answer.token_ids[: len(expected)]) for answer in output.outputs] == [expected] * 3
    assert output.num_cached_tokens >= len(plan.token_ids)
    assert desk.engine.board.noted(plan.id) is None
    desk.engine.board.retire(plan.id)


def test_an_answer_that_is_given_up_leaves_no_record_and_the_engine_serves_on(desk: Desk, plans: list[Plan]) -> None:
    plan = plans[1]
    expected = desk.ask(plan)
    stream = desk.engine.stream(desk.request(plan, question="Count from one to one thousand.", max_tokens=500))
    pieces = iter(stream)
    next(pieces)
    assert desk.engine.board.has(plan.id)
    stream.close()
    assert stream.result.finish_reason == "closed"
    assert stream.result.injected_tokens == len(plan.token_ids)
    assert not [path.name for path in (desk.engine.root / FOLDER).iterdir() if path.name.startswith(plan.id)]
    forget_blocks(desk)  # it refuses while a request runs: this one was aborted
    assert desk.ask(plan).token_ids == expected.token_ids


def test_a_request_for_the_prompts_probabilities_is_prefilled_as_text(desk: Desk, plans: list[Plan]) -> None:
    plan = plans[2]
    request = desk.request(plan)
    text = desk.ask(plan, inject=False)
    output = final(desk, request, plan, temperature=0.0, prompt_logprobs=0)
    assert desk.engine.board.noted(plan.id) == "prompt_logprobs"
    desk.engine.board.retire(plan.id)
    assert output.num_cached_tokens == 0
    assert len(output.prompt_logprobs) == len(request.prompt_ids)
    assert tuple(output.outputs[0].token_ids[: len(text.token_ids)]) == text.token_ids


@pytest.mark.parametrize("header_only", [True, False])
def test_a_plan_of_all_but_one_token_is_injected(desk: Desk, plans: list[Plan], header_only: bool) -> None:
    plan = desk.plan([], Scope(user="nearly all")) if header_only else plans[3]
    request = desk.request(plan)
    request = replace(request, prompt_ids=request.prompt_ids[: len(plan.token_ids) + 1])
    answer = desk.engine.generate(request)
    assert (answer.fallback, answer.injected_tokens) == (None, len(plan.token_ids))
    assert answer.token_ids == desk.engine.encoding.generate(request).token_ids
    if header_only:
        assert answer.token_ids == desk.engine.generate(replace(request, plan=None)).token_ids


def test_a_plan_of_the_whole_prompt_is_prefilled_as_text(desk: Desk, plans: list[Plan]) -> None:
    plan = plans[4]
    request = replace(desk.request(plan), prompt_ids=plan.token_ids)
    answer = desk.engine.generate(request)
    assert (answer.fallback, answer.injected_tokens) == ("prompt_mismatch", 0)
    assert answer.token_ids == desk.engine.generate(replace(request, plan=None)).token_ids
