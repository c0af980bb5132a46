"""The embedded engine: injection, fallbacks, sampling, limits."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inferscale.compose import PlanFact, build_plan, place
from inferscale.config import EncodeConfig, Sampling
from inferscale.core import ChunkKey, ChunkKV, FactId, Plan, Scope, token_digest
from inferscale.decoder.forward import KVBuffer, extend
from inferscale.decoder.transformers import TransformersDecoder
from inferscale.encode import EncodeJob, create_encoder, encode_header
from inferscale.engine import Engine, Message, Request
from inferscale.engine.base import Pieces
from inferscale.engine.transformers import Sampler, TransformersEngine
from inferscale.errors import ConfigError, ModelNotFound, PromptTooLong
from inferscale.store import RamStore
from tests.tiny import tiny_decoder

SCOPE = Scope(user="alice")
CONFIG = EncodeConfig(companions=0)
LINES = ["- Rex is a collie.\n", "- Tom lives in Lisbon.\n", "- Ana plays the cello.\n"]


def remember(engine: TransformersEngine, lines: Sequence[str]) -> tuple[RamStore, list[PlanFact]]:
    """Encode lines behind the header only and store them."""
    store, recipe = RamStore(1 << 30), engine.recipe(CONFIG).id
    jobs = [EncodeJob(engine.prompt.fact_ids(line)) for line in lines]
    facts: list[PlanFact | None] = [None] * len(jobs)
    for index, kv in (fact for results in engine.encoder(CONFIG).encode(jobs) for fact in results):
        key = ChunkKey(SCOPE.id, FactId(f"f{index}"), recipe, token_digest(kv.token_ids))
        store.put_many([(key, kv)])
        facts[index] = PlanFact(kv.token_ids, key)
    return store, [fact for fact in facts if fact is not None]


def planned(engine: TransformersEngine, facts: Sequence[PlanFact], hot: int = 0) -> tuple[Plan, tuple[int, ...]]:
    plan = build_plan(SCOPE, engine.recipe(CONFIG).id, engine.prompt.header_ids, facts, hot)
    return plan, (*plan.prompt_ids, *engine.prompt.layout([Message("user", "Which breed is Rex?")])[1])


def test_one_fact_behind_the_header_answers_exactly_as_prefilled_text(tiny_engine: TransformersEngine) -> None:
    store, facts = remember(tiny_engine, LINES)
    for fact in facts:
        plan, prompt = planned(tiny_engine, [fact])
        injected = tiny_engine.generate(Request(prompt, plan, Sampling(max_tokens=12), store))
        text = tiny_engine.generate(Request(prompt, None, Sampling(max_tokens=12)))
        assert injected.token_ids == text.token_ids
        assert (injected.injected_tokens, injected.fallback) == (len(plan.token_ids), None)
        assert (text.injected_tokens, text.fallback) == (0, None)


def test_a_chunk_made_behind_a_system_prompt_answers_behind_it_exactly_as_prefilled_text(
    tiny_engine: TransformersEngine,
) -> None:
    conversation = [Message("system", "You are a pirate. Answer in rhyme."), Message("user", "Which breed is Rex?")]
    header, tail = tiny_engine.prompt.layout(conversation)
    assert header != tiny_engine.prompt.header_ids
    encoder = create_encoder(tiny_engine.decoder, tiny_engine.headers.get(header), CONFIG)
    (((_, kv),),) = encoder.encode([EncodeJob(tiny_engine.prompt.fact_ids(LINES[0]))])
    recipe, store = tiny_engine.recipe(CONFIG).id, RamStore(1 << 30)
    key = ChunkKey(SCOPE.id, FactId("f"), recipe, token_digest(kv.token_ids))
    store.put_many([(key, kv)])
    for facts in ([], [PlanFact(kv.token_ids, key)]):
        plan = build_plan(SCOPE, recipe, header, facts)
        prompt = (*plan.prompt_ids, *tail)
        injected = tiny_engine.generate(Request(prompt, plan, Sampling(max_tokens=12), store))
        text = tiny_engine.generate(Request(prompt, None, Sampling(max_tokens=12)))
        assert injected.token_ids == text.token_ids
        assert (injected.injected_tokens, injected.fallback) == (len(plan.token_ids), None)


def test_a_header_seen_for_the_first_time_is_computed_once_and_counts_as_composing(
    tiny_engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    headers: list[tuple[int, ...]] = []

    def slow_header(decoder: Any, token_ids: Sequence[int]) -> ChunkKV:
        now[0] += 100.0
        headers.append(tuple(token_ids))
        return encode_header(decoder, token_ids)

    monkeypatch.setattr("inferscale.encode.header.encode_header", slow_header)
    for module in ("transformers", "run"):
        monkeypatch.setattr(f"inferscale.engine.{module}.time", SimpleNamespace(perf_counter=lambda: now[0]))
    header, tail = tiny_engine.prompt.layout([Message("system", "Seen first."), Message("user", "Q?")])
    plan = build_plan(SCOPE, tiny_engine.recipe(CONFIG).id, header, [])
    request = Request((*plan.prompt_ids, *tail), plan, Sampling(max_tokens=3))
    first, second = tiny_engine.generate(request), tiny_engine.generate(request)
    assert headers == [header]
    assert (first.timings["compose"], first.timings["first_token"]) == (100.0, 100.0)
    assert second.timings["compose"] == 0.0
    assert first.token_ids == second.token_ids


def test_a_plan_without_a_header_is_prefilled_as_text(tiny_engine: TransformersEngine) -> None:
    plan = build_plan(SCOPE, tiny_engine.recipe(CONFIG).id, (), [])
    reply = tiny_engine.generate(Request((5, 6, 7), plan, Sampling(max_tokens=2)))
    assert (reply.fallback, reply.injected_tokens) == ("prompt_mismatch", 0)


def test_a_closed_stream_computes_nothing_more_and_keeps_what_there_was(
    tiny_engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, prompt = planned(tiny_engine, [])
    whole = tiny_engine.generate(Request(prompt, None, Sampling(max_tokens=40)))
    passes = []
    embed = tiny_engine.decoder.embed
    monkeypatch.setattr(tiny_engine.decoder, "embed", lambda ids: (passes.append(len(ids)), embed(ids))[1])
    with tiny_engine.stream(Request(prompt, None, Sampling(max_tokens=40))) as stream:
        said = next(stream)
        computed = len(passes)
        assert 0 < computed < 40
    stream.close()
    assert list(stream) == []
    assert len(passes) == computed
    assert (stream.result.text, stream.result.finish_reason) == (said, "closed")
    assert whole.text.startswith(said)
    assert len(stream.result.token_ids) <= computed
    assert stream.result.timings["decode"] >= 0


def test_another_thread_may_close_a_stream_while_a_piece_is_being_made() -> None:
    made, closing = threading.Event(), threading.Event()
    ended: list[str] = []

    def slow() -> Generator[str]:
        try:
            while True:
                made.set()
                assert closing.wait(10)
                yield "piece"
        finally:
            ended.append(threading.current_thread().name)

    stream = Pieces(slow())
    reader = threading.Thread(target=lambda: list(stream), name="reader")
    reader.start()
    assert made.wait(10)
    stream.close()  # the reader is inside: returns at once
    assert ended == []
    closing.set()
    reader.join(10)
    assert ended == ["reader"]
    assert list(stream) == []


def test_hot_facts_are_prefilled_behind_the_injected_ones(tiny_engine: TransformersEngine) -> None:
    store, facts = remember(tiny_engine, LINES)
    plan, prompt = planned(tiny_engine, facts, hot=1)
    reply = tiny_engine.generate(Request(prompt, plan, Sampling(max_tokens=3), store))
    assert (
        reply.injected_tokens
        == len(plan.token_ids)
        == len(prompt) - len(plan.hot_ids) - len(tiny_engine.prompt.layout([Message("user", "Which breed is Rex?")])[1])
    )


@pytest.mark.parametrize(
    "fault", ["missing", "shape", "dtype", "tokens", "recipe", "header", "prompt", "another store"]
)
def test_whatever_fails_verification_is_prefilled_as_text_and_says_so(
    tiny_engine: TransformersEngine, fault: str
) -> None:
    store, facts = remember(tiny_engine, LINES)
    plan, prompt = planned(tiny_engine, facts)
    expected = tiny_engine.generate(Request(prompt, None, Sampling(max_tokens=6)))
    key = plan.chunks[1].key
    (kv,) = store.get_many([key])
    assert kv is not None
    reason = "missing_chunk"
    if fault == "missing":
        store.delete(key.scope, key.fact)
    elif fault == "shape":
        store.put_many([(key, ChunkKV(kv.token_ids, kv.keys[:-1], kv.values[:-1]))])
        reason = "shape_mismatch"
    elif fault == "dtype":
        store.put_many([(key, ChunkKV(kv.token_ids, kv.keys.bfloat16(), kv.values.bfloat16()))])
        reason = "shape_mismatch"
    elif fault == "tokens":
        chunks = (plan.chunks[0], replace(plan.chunks[1], key=replace(key, tokens="0" * 32)), *plan.chunks[2:])
        plan, reason = replace(plan, chunks=chunks), "token_mismatch"
    elif fault == "recipe":
        plan, reason = replace(plan, recipe="x" * 32), "recipe_mismatch"  # type: ignore[arg-type]
    elif fault == "header":
        plan, reason = replace(plan, header_tokens=plan.header_tokens - 1), "recipe_mismatch"
    elif fault == "prompt":
        plan, reason = replace(plan, token_ids=(*plan.token_ids[:-1], 5)), "prompt_mismatch"
    else:
        store = RamStore(1)
    reply = tiny_engine.generate(Request(prompt, plan, Sampling(max_tokens=6), store))
    assert (reply.fallback, reply.injected_tokens) == (reason, 0)
    assert reply.token_ids == expected.token_ids


def test_streaming_gives_the_same_text_as_the_whole_answer(tiny_engine: TransformersEngine) -> None:
    _, prompt = planned(tiny_engine, [])
    stream = tiny_engine.stream(Request(prompt, None, Sampling(max_tokens=9)))
    pieces = list(stream)
    assert (
        "".join(pieces)
        == stream.result.text
        == tiny_engine.generate(Request(prompt, None, Sampling(max_tokens=9))).text
    )
    assert len(pieces) > 1


def test_max_tokens_stop_strings_and_end_tokens_end_an_answer(tiny_engine: TransformersEngine) -> None:
    _, prompt = planned(tiny_engine, [])
    whole = tiny_engine.generate(Request(prompt, None, Sampling(max_tokens=8)))
    assert (len(whole.token_ids), whole.finish_reason) == (8, "length")
    stop = whole.text[3:6]
    cut = tiny_engine.generate(Request(prompt, None, Sampling(max_tokens=8, stop=(stop,))))
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(tiny_engine: TransformersEngine) -> None:
    _, prompt = planned(tiny_engine, [])

    def sample(seed: int) -> tuple[int, ...]:
        return tiny_engine.generate(Request(prompt, None, Sampling(max_tokens=8, temperature=1.5, seed=seed))).token_ids

    assert sample(1) == sample(1) != sample(2)


def test_nucleus_sampling_keeps_the_smallest_set_that_reaches_top_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    seen = {Sampler(Sampling(temperature=1.0, top_p=0.7, seed=s), torch.device("cpu")).pick(logits) for s in range(60)}
    assert seen == {0, 1}
    tiny = {Sampler(Sampling(temperature=1.0, top_p=0.01, seed=s), torch.device("cpu")).pick(logits) for s in range(9)}
    assert tiny == {0}


def test_a_prompt_that_fills_the_context_is_refused_and_one_less_answers_one_token(
    tiny_engine: TransformersEngine,
) -> None:
    context = tiny_engine.spec.max_positions
    with pytest.raises(PromptTooLong, match="Shorten the message"):
        tiny_engine.stream(Request((5,) * context))
    reply = tiny_engine.generate(Request((5,) * (context - 1)))
    assert len(reply.token_ids) <= 1


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"engine": "magic"}, ConfigError),
        ({"dtype": "int3"}, ConfigError),
        ({"device": "toaster"}, ConfigError),
        ({"name_or_path": "no-such-model"}, ModelNotFound),
        ({"name_or_path": "/no/such/folder"}, ModelNotFound),
    ],
)
def test_loading_fails_with_one_clear_sentence(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Engine.from_pretrained(**{"name_or_path": "smollm2-135m-instruct", **changes})
    assert len(str(caught.value)) > 10
    assert "\n" not in str(caught.value)


def test_bfloat16_injection_follows_bfloat16_prefill(tokenizer: Any) -> None:
    decoder = tiny_decoder("qwen3", "yarn", vocab_size=len(tokenizer), max_position_embeddings=512)
    engine = TransformersEngine(TransformersDecoder(decoder.model.bfloat16(), "tiny", "bf16"), tokenizer)
    store, facts = remember(engine, LINES)
    plan, prompt = planned(engine, facts[:1])
    rows = []
    for parts in (engine.fetch(plan, prompt, store), []):
        buffer = KVBuffer.for_decoder(engine.decoder, len(prompt))
        place(engine.decoder, parts, buffer)
        rest = torch.tensor(prompt[buffer.length :])
        rows.append(engine.decoder.logits(extend(engine.decoder, rest, buffer)[-1:]))
    torch.testing.assert_close(rows[0], rows[1], rtol=5e-2, atol=5e-2 * float(rows[1].abs().max()))
