"""One chunk as the whole prefix: injected and prefilled, the same tokens in float32."""

from __future__ import annotations

import pytest
import torch

from inferscale.core import Scope
from tests.engine.vllm.kit import LINES, Desk

SCOPE = Scope(user="exact")
BLOCK = 32


def text_ids(desk: Desk, n: int, seed: int) -> tuple[int, ...]:
    """`n` tokens of no meaning."""
    ids = torch.randint(1000, 40000, (n,), generator=torch.Generator().manual_seed(seed))
    return tuple(ids.tolist())


@pytest.mark.parametrize("length", [1, 2, *(k * BLOCK + d for k in (1, 2, 4) for d in (-1, 0, 1)), 333])
def test_a_header_of_any_length_answers_as_prefilled_text(desk: Desk, length: int) -> None:
    plan = desk.plan([], SCOPE, header=text_ids(desk, length, length))
    injected, text = desk.ask(plan), desk.ask(plan, inject=False)
    assert (injected.injected_tokens, injected.fallback) == (length, None)
    assert injected.token_ids == text.token_ids


@pytest.mark.parametrize("end", [k * BLOCK + d for k in (2, 3, 8) for d in (-1, 0, 1)])
def test_a_fact_that_ends_anywhere_in_a_block_answers_as_prefilled_text(desk: Desk, end: int) -> None:
    length = end - len(desk.engine.prompt.header_ids)
    (fact,) = desk.remember_ids([text_ids(desk, length, end)], SCOPE)
    plan = desk.plan([fact], SCOPE)
    assert len(plan.token_ids) == end
    injected, text = desk.ask(plan), desk.ask(plan, inject=False)
    assert (injected.injected_tokens, injected.fallback) == (end, None)
    assert injected.token_ids == text.token_ids


def test_many_facts_answer_as_the_embedded_engine_injects_them(desk: Desk) -> None:
    plan = desk.plan(desk.remember(LINES, SCOPE), SCOPE)
    request = desk.request(plan, max_tokens=24)
    ours, embedded = desk.engine.generate(request), desk.engine.encoding.generate(request)
    assert ours.fallback is None
    assert ours.injected_tokens == embedded.injected_tokens == len(plan.token_ids)
    assert ours.token_ids == embedded.token_ids
