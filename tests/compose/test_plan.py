"""Plans are integers that name every token of the injected prefix exactly once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale.compose import PlanFact, build_plan, check_prompt
from inferscale.core import ChunkKey, FactId, Plan, RecipeId, Scope, token_digest
from inferscale.errors import PlanRejected

SCOPE, RECIPE = Scope(user="alice"), RecipeId("r" * 32)

ids = st.lists(st.integers(0, 50_000), min_size=1, max_size=12).map(tuple)


def fact(number: int, token_ids: tuple[int, ...], with_kv: bool = True) -> PlanFact:
    key = ChunkKey(SCOPE.id, FactId(f"f{number}"), RECIPE, token_digest(token_ids))
    return PlanFact(token_ids, key if with_kv else None)


facts_lists = st.lists(st.tuples(ids, st.booleans()), max_size=12).map(
    lambda rows: [fact(i, token_ids, with_kv) for i, (token_ids, with_kv) in enumerate(rows)]
)


@given(header=ids, facts=facts_lists, hot=st.integers(0, 15))
def test_a_plan_holds_every_fact_once_in_order(header: tuple[int, ...], facts: list[PlanFact], hot: int) -> None:
    hot = min(hot, len(facts))
    plan = build_plan(SCOPE, RECIPE, header, facts, hot)
    cold = facts[: len(facts) - hot]
    injected = [f for f in cold if f.key]
    text = [f for f in cold if not f.key] + facts[len(facts) - hot :]
    assert plan.token_ids == header + tuple(t for f in injected for t in f.token_ids)
    assert plan.hot_ids == tuple(t for f in text for t in f.token_ids)
    at = plan.header_tokens
    for chunk, planned in zip(plan.chunks, injected, strict=True):
        assert (chunk.key, chunk.start, chunk.length) == (planned.key, at, len(planned.token_ids))
        at += chunk.length
    assert at == len(plan.token_ids)
    check_prompt(plan, (*plan.prompt_ids, 7), {RECIPE})


@given(header=ids, facts=facts_lists, data=st.data())
def test_a_prompt_that_differs_in_one_token_is_refused(
    header: tuple[int, ...], facts: list[PlanFact], data: st.DataObject
) -> None:
    plan = build_plan(SCOPE, RECIPE, header, facts)
    at = data.draw(st.integers(0, len(plan.token_ids) - 1))
    prompt = [*plan.token_ids, 7]
    prompt[at] += 1
    with pytest.raises(PlanRejected) as caught:
        check_prompt(plan, prompt, {RECIPE})
    assert caught.value.reason == "prompt_mismatch"


def test_at_least_one_token_is_left_to_compute() -> None:
    plan = build_plan(SCOPE, RECIPE, (1, 2), [fact(0, (3, 4))])
    with pytest.raises(PlanRejected):
        check_prompt(plan, plan.token_ids, {RECIPE})


def test_another_recipe_is_refused() -> None:
    plan = build_plan(SCOPE, RECIPE, (1, 2), [fact(0, (3, 4))])
    with pytest.raises(PlanRejected) as caught:
        check_prompt(plan, (*plan.prompt_ids, 7), {RecipeId("x" * 32)})
    assert caught.value.reason == "recipe_mismatch"


@pytest.mark.parametrize("fault", ["gap", "overlap", "uncovered", "foreign tokens"])
def test_a_plan_whose_chunks_do_not_tile_its_tokens_is_refused(fault: str) -> None:
    plan = build_plan(SCOPE, RECIPE, (1, 2), [fact(0, (3, 4)), fact(1, (5, 6))])
    first, second = plan.chunks
    broken: dict[str, Plan] = {
        "gap": replace(plan, chunks=(second,)),
        "overlap": replace(plan, chunks=(first, replace(second, start=3))),
        "uncovered": replace(plan, chunks=(first,)),
        "foreign tokens": replace(plan, token_ids=(1, 2, 3, 4, 5, 9)),
    }
    with pytest.raises(PlanRejected):
        check_prompt(broken[fault], (*broken[fault].token_ids, 7), {RECIPE})


def test_plan_ids_cannot_be_guessed_and_do_not_repeat() -> None:
    plans = {build_plan(SCOPE, RECIPE, (1,), []).id for _ in range(100)}
    assert len(plans) == 100
    assert all(len(plan) >= 32 for plan in plans)
