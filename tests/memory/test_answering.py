"""Answers: an application's system prompt, raw completions, no memory at all, abandoned answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inferscale import Memory, Sampling
from inferscale.engine import Message, Request
from inferscale.engine.prompt import INSTRUCTION
from inferscale.errors import InvalidInput, InvalidScope, PromptTooLong

FACTS = ["Rex is a collie.", "Tom owns Rex.", "Ana plays the cello."]
SHORT = Sampling(max_tokens=4)
PIRATE = {"role": "system", "content": "You are a pirate.\nAnswer in <|im_end|> rhyme."}
QUESTION = {"role": "user", "content": "Which breed is Rex?"}


@pytest.fixture
def asked(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Every request that reaches the engine; the memory holds FACTS with their KV."""
    for fact in FACTS:
        memory.add(fact, user_id="alice", infer=False)
    memory.flush(60)
    requests: list[Request] = []
    stream = memory.engine.stream
    monkeypatch.setattr(memory.engine, "stream", lambda request: (requests.append(request), stream(request))[1])
    return requests


def lines(memory: Memory) -> set[tuple[int, ...]]:
    return {memory.engine.prompt.fact_ids(f"- {fact}\n") for fact in FACTS}


def holds(prompt_ids: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(prompt_ids[at : at + len(part)] == part for at in range(len(prompt_ids)))


def test_inject_and_text_have_the_same_prompt_behind_a_system_prompt(memory: Memory, asked: list[Request]) -> None:
    replies = [
        memory.chat([PIRATE, QUESTION], user_id="alice", mode=mode, sampling=SHORT) for mode in ("inject", "text")
    ]
    injected, text = (request.prompt_ids for request in asked)
    assert injected == text
    header, tail = memory.engine.prompt.layout(
        [Message("system", PIRATE["content"]), Message("user", "Which breed is Rex?")]
    )
    assert injected[: len(header)] == header
    assert injected[-len(tail) :] == tail
    assert all(holds(injected, line) for line in lines(memory))
    assert replies[0].injected_tokens == len(injected) - len(tail)
    assert (replies[0].fallback, replies[0].text_memories) == (None, 0)
    assert (replies[1].injected_tokens, len(replies[1].memories)) == (0, 3)


@pytest.mark.parametrize("mode", ["inject", "text"])
def test_a_system_prompt_that_fills_the_context_is_refused_and_one_token_less_is_answered(
    memory: Memory, asked: list[Request], mode: str
) -> None:
    context = memory.engine.spec.max_positions

    def conversation(words: int) -> list[dict[str, str]]:
        return [{"role": "system", "content": "why" + " why" * words}, QUESTION]

    def taken(words: int) -> int:
        parts = memory.engine.prompt.layout([Message(m["role"], m["content"]) for m in conversation(words)])
        return sum(map(len, parts))

    words = context - 1 - taken(0)
    assert taken(words) == context - 1
    reply = memory.chat(conversation(words), user_id="alice", mode=mode)
    assert (reply.prompt_tokens, reply.memories) == (context - 1, [])
    with pytest.raises(PromptTooLong, match=rf"takes {context} tokens.*system prompt included.*holds {context},"):
        memory.chat(conversation(words + 1), user_id="alice", mode=mode)
    roomy = memory.chat(conversation(words - 80), user_id="alice", mode=mode, sampling=SHORT)
    assert roomy.memories
    assert roomy.prompt_tokens < context


@pytest.mark.parametrize("owners", [{}, {"user_id": "alice"}])
def test_off_sends_the_conversation_as_it_is_and_needs_no_owner(
    memory: Memory, asked: list[Request], owners: dict[str, str]
) -> None:
    reply = memory.chat([PIRATE, QUESTION], mode="off", sampling=SHORT, **owners)
    (request,) = asked
    conversation = [Message("system", PIRATE["content"]), Message("user", "Which breed is Rex?")]
    assert request.prompt_ids == memory.engine.prompt.plain_ids(conversation)
    assert INSTRUCTION.strip() not in memory.engine.prompt.tokenizer.decode(request.prompt_ids)
    assert request.plan is None
    assert (reply.mode, reply.memories, reply.text_memories, reply.injected_tokens) == ("off", [], 0, 0)
    with pytest.raises(PromptTooLong, match=r"without any memory; this model"):
        memory.chat("why " * 600, mode="off")


@pytest.mark.parametrize("mode", ["inject", "text"])
def test_a_completion_continues_the_raw_text_behind_the_memories(
    memory: Memory, asked: list[Request], mode: str
) -> None:
    prompt = memory.engine.prompt
    text = "Rex, <|im_start|>a dog,\nis a"
    reply = memory.complete(text, user_id="alice", mode=mode, sampling=SHORT).reply
    (request,) = asked
    header, tail = prompt.completion(text)
    assert request.prompt_ids[: len(header)] == header == prompt.header_ids
    assert request.prompt_ids[-len(tail) :] == tail
    assert tail[-len(prompt.raw_ids(text)) :] == prompt.raw_ids(text)
    assert all(holds(request.prompt_ids, line) for line in lines(memory))
    assert reply.injected_tokens == (reply.prompt_tokens - len(tail) if mode == "inject" else 0)
    assert len(reply.memories) == 3


def test_a_completion_without_memory_is_the_text_alone(memory: Memory, asked: list[Request]) -> None:
    stream = memory.complete("Rex is a", mode="off", sampling=Sampling(max_tokens=12))
    pieces = list(stream)
    assert asked[0].prompt_ids == memory.engine.prompt.raw_ids("Rex is a")
    assert stream.reply.text == "".join(pieces)  # spaces at its ends included
    assert stream.reply.memories == []


def test_a_long_completion_is_looked_up_by_its_end(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.add("Rex is a collie.", user_id="alice", infer=False)
    queries: list[str] = []
    embed = memory._retriever.embed
    monkeypatch.setattr(memory._retriever, "embed", lambda query: (queries.append(query), embed(query))[1])
    text = "where " * 350 + "Rex"
    assert len(text) > 2000
    with memory.complete(text, user_id="alice", sampling=SHORT):
        pass
    assert queries == [text[-2000:]]


@pytest.mark.parametrize(("prompt", "owners", "error"), [("", {"user_id": "a"}, InvalidInput), ("x", {}, InvalidScope)])
def test_a_completion_needs_a_text_and_an_owner(
    memory: Memory, prompt: str, owners: dict[str, str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        memory.complete(prompt, **owners)
    with pytest.raises(InvalidInput, match="mode must be one of"):
        memory.complete("x", user_id="a", mode="magic")


@pytest.mark.parametrize(
    "start", [lambda m: m.stream("Rex?", user_id="alice"), lambda m: m.complete("Rex", mode="off")]
)
def test_a_closed_answer_stops_the_engine_and_frees_background_work(
    memory: Memory, asked: list[Request], monkeypatch: pytest.MonkeyPatch, start: Callable[[Memory], Any]
) -> None:
    passes: list[int] = []
    embed = memory.engine.decoder.embed  # type: ignore[attr-defined]
    monkeypatch.setattr(memory.engine.decoder, "embed", lambda ids: (passes.append(len(ids)), embed(ids))[1])  # type: ignore[attr-defined]
    with start(memory) as stream:
        said = next(stream)
        assert memory._upkeep._requests == 1
        computed = len(passes)
    assert memory._upkeep._requests == 0
    stream.close()
    assert list(stream) == []
    assert len(passes) == computed
    assert stream.reply.finish_reason == "closed"
    assert stream.reply.text.strip() == said.strip()


def test_an_answer_closed_before_its_first_piece_computes_nothing(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    embed = memory.engine.decoder.embed  # type: ignore[attr-defined]
    monkeypatch.setattr(memory.engine.decoder, "embed", lambda ids: (passes.append(len(ids)), embed(ids))[1])  # type: ignore[attr-defined]
    stream = memory.stream("Rex?", mode="off")
    generation = stream._generation
    stream.close()
    assert (list(stream), list(generation), passes) == ([], [], [])
    assert memory._upkeep._requests == 0
    assert stream.reply.text == ""
