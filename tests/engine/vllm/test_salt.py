"""Injected KV stays within its plan's salt: nobody else is answered from it, and what is refused is text.

The KV injected here is not the text's own, so an answer shows where it came from.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from prometheus_client import REGISTRY

from inferscale.compose import PlanFact
from inferscale.core import ChunkKey, ChunkKV, FactId, Plan, Scope, token_digest
from inferscale.engine import Request
from inferscale.engine.vllm.plans import record_of
from tests.engine.vllm.kit import CONFIG, QUESTION, Desk

BLOCK = 32
HEADER, FACT = 40, 75
ALICE, BOB = Scope(user="alice"), Scope(user="bob")
COUNTED_SECONDS = 5.0


SEEDS = itertools.count(70_000)


def unseen(n: int) -> tuple[int, ...]:
    """Tokens that no other test has sent."""
    ids = torch.randint(1000, 40000, (n,), generator=torch.Generator().manual_seed(next(SEEDS)))
    return tuple(ids.tolist())


def counts() -> Counter[str]:
    """The connector's counters in Prometheus, refusals by reason."""
    found: Counter[str] = Counter()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.startswith("vllm:inferscale_") and sample.name.endswith("_total"):
                name = sample.name.removeprefix("vllm:inferscale_").removesuffix("_total")
                found[sample.labels.get("reason", name)] += int(sample.value)
    return found


def counted(before: Counter[str], key: str) -> Counter[str]:
    """What was counted since, once `key` is among it."""
    until = time.monotonic() + COUNTED_SECONDS
    while counts()[key] == before[key] and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.2)  # so that what is counted beside it, and should not be, is seen
    return counts() - before


@dataclass
class Told:
    """A plan whose one fact says something else in KV than in text."""

    desk: Desk
    plan: Plan
    fact: PlanFact

    def request(self, question: str = QUESTION, inject: bool = True) -> Request:
        return self.desk.request(self.plan, question, max_tokens=8, inject=inject)

    def injected(self, question: str = QUESTION) -> tuple[int, ...]:
        """What the embedded engine answers from the KV that is in the store now."""
        return self.desk.engine.encoding.generate(self.request(question)).token_ids

    def text(self, question: str = QUESTION) -> tuple[int, ...]:
        """What the embedded engine, which has no cache of prefixes, answers from the text."""
        return self.desk.engine.encoding.generate(self.request(question, inject=False)).token_ids

    def plain(self) -> tuple[tuple[int, ...], int]:
        """vLLM's answer to the same tokens from somebody who knows no plan, and how many were not computed."""
        return self.sent(None, None)

    def sent(
        self, plan: str | None, salt: str | None, prompt_ids: tuple[int, ...] | None = None
    ) -> tuple[tuple[int, ...], int]:
        request = self.request(inject=False)
        tokens, cached = self.desk.raw(
            replace(request, prompt_ids=prompt_ids or request.prompt_ids), plan=plan, salt=salt
        )
        return tuple(token for token in tokens if token not in self.desk.engine.encoding.ends), cached

    def say_otherwise(self) -> None:
        """Other KV under the same key."""
        spec = self.desk.engine.spec
        kv = torch.randn(2, spec.layers, len(self.fact.token_ids), spec.kv_heads, spec.head_dim)
        assert self.fact.key is not None
        self.desk.store.put_many([(self.fact.key, ChunkKV(self.fact.token_ids, kv[0], kv[1]))])


def tell(desk: Desk, scope: Scope = ALICE, header: tuple[int, ...] = (), line: tuple[int, ...] = ()) -> Told:
    line = line or unseen(FACT)
    digest = token_digest(line)
    fact = PlanFact(line, ChunkKey(scope.id, FactId(f"f{digest[:12]}"), desk.recipe, digest))
    told = Told(desk, desk.plan([fact], scope, header=header or unseen(HEADER)), fact)
    told.say_otherwise()
    return told


@pytest.fixture
def told(desk: Desk) -> Told:
    return tell(desk)


def test_a_plain_request_is_not_answered_from_injected_blocks(told: Told) -> None:
    answer = told.desk.engine.generate(told.request())
    assert answer.fallback is None
    assert answer.token_ids == told.injected() != told.text()
    assert told.plain() == (told.text(), 0)
    tokens, cached = told.plain()
    assert tokens == told.text()
    assert cached >= len(told.plan.token_ids) // BLOCK * BLOCK, "the engine caches prefixes, so 0 above says something"


def test_a_plan_is_not_answered_from_plain_blocks(told: Told) -> None:
    assert told.plain() == (told.text(), 0)
    before = counts()
    assert told.desk.engine.generate(told.request()).token_ids == told.injected()
    assert counted(before, "hits")["tokens"] == len(told.plan.token_ids)


def test_side_by_side_neither_sees_the_other(told: Told) -> None:
    with ThreadPoolExecutor() as pool:
        plain = [pool.submit(told.plain) for _ in range(3)]
        planned = [pool.submit(told.desk.ask, tell(told.desk, ALICE, told.plan.token_ids[:HEADER]).plan)]
        planned.append(pool.submit(told.desk.engine.generate, told.request()))
        assert {answer.result()[0] for answer in plain} == {told.text()}
        assert planned[1].result().token_ids == told.injected()
        assert planned[0].result().fallback is None


def test_another_users_plan_over_the_same_text_shares_nothing(told: Told) -> None:
    told.desk.engine.generate(told.request())
    other = tell(told.desk, BOB, told.plan.token_ids[:HEADER], told.fact.token_ids)
    assert other.plan.token_ids == told.plan.token_ids
    before = counts()
    answer = told.desk.engine.generate(other.request())
    assert answer.token_ids == other.injected() != told.injected()
    assert counted(before, "hits")["tokens"] == len(other.plan.token_ids)


@pytest.mark.parametrize("again", ["published again", "planned again"])
def test_the_same_memories_of_the_same_user_are_found_in_the_prefix_cache(told: Told, again: str) -> None:
    told.desk.engine.generate(told.request())
    if again == "planned again":
        header = told.plan.token_ids[:HEADER]
        told.plan = told.desk.plan([told.fact], ALICE, header=header)
    question = "Where does Tom live?"
    before = counts()
    answer = told.desk.engine.generate(told.request(question))
    assert answer.token_ids == told.injected(question)
    assert answer.injected_tokens == len(told.plan.token_ids)
    new = counted(before, "hits")
    assert (new["hits"], new["tokens"]) == (1, len(told.plan.token_ids) % BLOCK)


def test_kv_made_again_is_not_answered_from_blocks_of_the_old(told: Told) -> None:
    old = told.desk.engine.generate(told.request()).token_ids
    told.say_otherwise()
    before = counts()
    new = told.desk.engine.generate(told.request()).token_ids
    assert new == told.injected() != old
    assert counted(before, "hits")["tokens"] == len(told.plan.token_ids)


REFUSED = {
    "without its salt": "unsalted",
    "with another salt": "unsalted",
    "forged": "unknown_plan",
    "retired": "unknown_plan",
    "expired": "expired_plan",
    "first token another": "prompt_mismatch",
    "last token another": "prompt_mismatch",
    "of another encoder": "recipe_mismatch",
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_may_not_be_injected_is_text_and_counted_by_its_reason(told: Told, case: str) -> None:
    desk, name, last = told.desk, str(told.plan.id), len(told.plan.token_ids) - 1
    salt: str | None = desk.engine.publish(told.request(), told.plan)
    prompt = list(told.request().prompt_ids)
    record = record_of(told.plan, desk.engine.recipe(CONFIG), desk.engine.root)
    if case.endswith("token another"):
        at = 0 if case.startswith("first") else last
        prompt[at] += 1
    elif case == "forged":
        name = secrets.token_urlsafe(24)
    elif case == "retired":
        desk.engine.board.retire(name)
    elif case == "expired":
        desk.engine.board.publish(name, replace(record, expires=time.time() - 1))
    elif case == "of another encoder":
        recipe = replace(record.recipe, encoder_version=record.recipe.encoder_version + 1)
        desk.engine.board.publish(name, replace(record, recipe=recipe))
    else:
        salt = None if case.startswith("without") else secrets.token_hex(16)
    expected = desk.engine.encoding.generate(replace(told.request(inject=False), prompt_ids=tuple(prompt)))
    before = counts()
    assert told.sent(name, salt, tuple(prompt)) == (expected.token_ids, 0)
    assert counted(before, REFUSED[case]) == {REFUSED[case]: 1}
    desk.engine.board.retire(name)


def test_what_is_not_refused_is_injected_with_the_very_same_call(told: Told) -> None:
    """Else the refusals above might owe to something else."""
    salt = told.desk.engine.publish(told.request(), told.plan)
    assert told.sent(told.plan.id, salt) == (told.injected(), len(told.plan.token_ids))
    told.desk.engine.board.retire(told.plan.id)
