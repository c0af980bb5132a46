"""OpenAI's routes, with the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from inferscale.config import Sampling
from tests.serve.conftest import Served, until

QUESTION = "Which breed is Rex?"


def ask(gateway: Served, question: str = QUESTION, **options: Any) -> Any:
    options = {"user": "alice", "temperature": 0, "max_tokens": 12, **options}
    messages = options.pop("messages", [{"role": "user", "content": question}])
    return gateway.openai.chat.completions.create(model=gateway.model, messages=messages, **options)


def test_an_answer_is_the_memorys_own_and_says_what_it_was_given_from(gateway: Served) -> None:
    shown = ask(gateway).model_dump()
    own = gateway.memory.chat(QUESTION, user_id="alice", sampling=Sampling(max_tokens=12))
    (choice,) = shown["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (own.text, own.finish_reason)
    assert [used["id"] for used in shown["memory"]["used"]] == [memory["id"] for memory in own.memories]
    assert shown["memory"]["mode"] == "inject"
    assert shown["memory"]["fallback"] is None
    assert shown["usage"]["prompt_tokens"] == own.prompt_tokens
    assert shown["usage"]["prompt_tokens_details"]["cached_tokens"] == own.injected_tokens > 0
    assert shown["usage"]["total_tokens"] == own.prompt_tokens + own.completion_tokens
    assert set(shown["timings"]) == set(own.timings)


def test_a_stream_spells_the_same_answer_and_ends_with_its_usage(gateway: Served) -> None:
    whole = ask(gateway)
    chunks = list(ask(gateway, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip() == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    last, usage = chunks[-2], chunks[-1]
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert len(last.model_dump()["memory"]["used"]) == 3
    assert usage.usage == whole.usage
    assert not usage.choices
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_the_option_has_no_usage(gateway: Served) -> None:
    assert all(chunk.usage is None for chunk in ask(gateway, stream=True))


def test_a_text_is_continued(gateway: Served) -> None:
    create = gateway.openai.completions.create
    options: dict[str, Any] = {"model": gateway.model, "prompt": "Rex is a", "user": "alice", "temperature": 0}
    whole = create(**options)
    streamed = "".join(chunk.choices[0].text for chunk in create(**options, stream=True))
    assert whole.choices[0].text == streamed
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 16


def test_without_an_owner_there_are_no_memories(gateway: Served) -> None:
    shown = ask(gateway, user=openai.omit).model_dump()
    assert (shown["memory"]["mode"], shown["memory"]["used"]) == ("off", [])


@pytest.mark.parametrize(
    ("memory", "used", "injected"),
    [({"top_k": 1}, 1, True), ({"mode": "text"}, 3, False), ({"mode": "off"}, 0, False), ({"hot": 3}, 3, True)],
)
def test_options_of_memory(gateway: Served, memory: dict[str, Any], used: int, injected: bool) -> None:
    shown = ask(gateway, extra_body={"memory": memory}).model_dump()["memory"]
    assert (len(shown["used"]), shown["injected_tokens"] > 0) == (used, injected)


def test_a_system_prompt_stands_in_the_injected_header(gateway: Served) -> None:
    plain = ask(gateway).model_dump()["memory"]["injected_tokens"]
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "You are a pirate."}, {"role": "user", "content": QUESTION}]
        assert ask(gateway, messages=messages).model_dump()["memory"]["injected_tokens"] > plain


def test_a_message_may_come_in_parts(gateway: Served) -> None:
    parts = [{"type": "text", "text": "Which breed "}, {"type": "text", "text": "is Rex?"}]
    assert ask(gateway, messages=[{"role": "user", "content": parts}]).choices == ask(gateway).choices


def test_answers_end_at_their_limit(gateway: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        done = ask(gateway, **{"max_tokens": openai.omit, name: 3})
        assert done.usage.completion_tokens <= 3


def test_models(gateway: Served) -> None:
    client = gateway.openai
    (model,) = client.models.list()
    assert model.id == gateway.model == client.models.retrieve(gateway.model).id
    with pytest.raises(openai.NotFoundError, match="no other"):
        client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "neutral", [{"n": 1}, {"frequency_penalty": 0}, {"tools": []}, {"logprobs": False}, {"metadata": {"a": "b"}}]
)
def test_fields_that_ask_for_nothing_are_accepted(gateway: Served, neutral: dict[str, Any]) -> None:
    assert ask(gateway, **neutral).choices == ask(gateway).choices


@pytest.mark.parametrize(
    "wanted",
    [{"n": 2}, {"frequency_penalty": 0.5}, {"logprobs": True}, {"response_format": {"type": "json_object"}}],
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(gateway: Served, wanted: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match=next(iter(wanted))):
        ask(gateway, **wanted)


def test_too_long_a_conversation_is_refused_before_a_stream_begins(gateway: Served) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(gateway, "long " * 2000, stream=True)
    assert error.value.code == "context_length_exceeded"


def test_what_the_user_said_is_remembered_once_and_nothing_that_was_recalled(gateway: Served) -> None:
    memory = gateway.memory
    memory.add("Mia was born in 1990.", user_id="bob")
    messages = [
        {"role": "system", "content": "Known: Mia was born in 1990."},
        {"role": "user", "content": "Hello there."},
        {"role": "assistant", "content": "Mia was born in 1990."},
        {"role": "user", "content": "My cat is called Momo."},
    ]
    before = gateway.metric("inferscale_remembered_total")
    for _ in range(2):
        ask(gateway, user="bob", messages=messages, extra_body={"memory": {"add": True}})
    assert until(lambda: gateway.metric("inferscale_remembered_total") == before + 2)
    texts = [item["memory"] for item in memory.get_all(user_id="bob")["results"]]
    assert len(texts) == 2
    assert "Mia" in texts[0]
    assert "Momo" in texts[1]


def test_nobody_to_remember_it_for_is_an_error(gateway: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"memory\.add"):
        ask(gateway, user=openai.omit, extra_body={"memory": {"add": True}})
