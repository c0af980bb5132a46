"""A call that vLLM gives up: one with a plan is asked again as text from where it ended, any other is an error."""

from __future__ import annotations

import json
from collections.abc import Generator

import pytest

from inferscale.core import Scope
from inferscale.engine.vllm import http
from inferscale.engine.vllm.plans import FOLDER
from inferscale.engine.vllm.transport import Call, CallFailed, Tokens
from inferscale.errors import EngineUnavailable
from tests.engine.vllm.kit import LINES, Desk

SCOPE = Scope(user="given up")
QUESTION = "Tell me about Rex and about Tom."


class GivesUp:
    """A desk's real transport, except that its first call, or every call, ends after some tokens."""

    def __init__(self, desk: Desk, patch: pytest.MonkeyPatch, after: int, always: bool = False) -> None:
        self.calls: list[Call] = []
        self._generate = desk.engine.transport.generate
        self._after = after
        self._always = always
        patch.setattr(desk.engine.transport, "generate", self.generate)

    def generate(self, call: Call) -> Generator[Tokens]:
        self.calls.append(call)
        fails = self._always or len(self.calls) == 1
        left = self._after
        for tokens in self._generate(call):
            if fails and len(tokens.ids) > left:
                yield Tokens(tokens.ids[:left], tokens.cached)
                raise CallFailed("given up")
            left -= len(tokens.ids)
            yield tokens


@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_answer_that_loses_its_kv_goes_on_from_text(desk: Desk, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    plan = desk.plan(desk.remember(LINES, SCOPE), SCOPE)
    whole = desk.ask(plan, QUESTION, max_tokens=20)
    begun = whole.token_ids[:after]
    transport = GivesUp(desk, monkeypatch, after)
    answer = desk.ask(plan, QUESTION, max_tokens=20)
    planned, rest = transport.calls
    assert planned.plan == plan.id
    assert (rest.plan, rest.salt, rest.max_tokens) == (None, None, 20 - after)
    assert rest.prompt_ids == planned.prompt_ids + begun
    text = desk.engine.encoding.generate(desk.request(plan, QUESTION, inject=False))
    assert answer.token_ids[:after] == begun
    assert after or answer.token_ids[: len(text.token_ids)] == text.token_ids
    assert (answer.fallback, answer.injected_tokens, answer.finish_reason) == ("load_failed", 0, whole.finish_reason)
    assert not (desk.engine.root / FOLDER / plan.id).exists()


def test_it_is_asked_again_only_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = desk.plan(desk.remember(LINES, SCOPE), SCOPE)
    transport = GivesUp(desk, monkeypatch, after=0, always=True)
    with pytest.raises(EngineUnavailable):
        desk.ask(plan)
    assert [call.plan for call in transport.calls] == [plan.id, None]
    assert not (desk.engine.root / FOLDER / plan.id).exists()


def test_a_call_without_a_plan_is_not_asked_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = GivesUp(desk, monkeypatch, after=2)
    with pytest.raises(EngineUnavailable):
        desk.ask(desk.plan([], SCOPE), inject=False)
    assert len(transport.calls) == 1


def test_a_server_that_gives_up_says_so_in_its_stream() -> None:
    chunks = [{"choices": [{"token_ids": [5, 6]}]}, {"error": {"message": "Internal server error", "code": 500}}]
    stream = http._tokens(f"data: {json.dumps(chunk)}" for chunk in chunks)
    assert next(stream) == Tokens((5, 6))
    with pytest.raises(CallFailed, match="Internal server error"):
        next(stream)
