"""The real small model: injection is exact where it must be, and close where it is approximate."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.fidelity.lab import Lab, Way
from inferscale.compose import place
from inferscale.config import EncodeConfig
from inferscale.decoder.forward import KVBuffer, extend
from inferscale.encode import EncodeJob
from inferscale.engine.transformers import TransformersEngine
from inferscale.facts.locomo import load_locomo


@pytest.fixture(scope="module")
def lab(real_engine: TransformersEngine, embedder: Any) -> Lab:
    (talk,) = load_locomo(Path(str(files("inferscale") / "data" / "demo_conversation.json")))
    return Lab(real_engine.decoder, real_engine.prompt, embedder, talk)


@pytest.mark.parametrize("words", [1, 40, 200])
def test_one_chunk_as_the_whole_prefix_gives_the_same_greedy_tokens(
    real_engine: TransformersEngine, words: int
) -> None:
    decoder, header = real_engine.decoder, real_engine.header
    fact = real_engine.prompt.fact_ids("- " + " ".join(f"word{n}" for n in range(words)) + "\n")
    (((_, kv),),) = real_engine.encoder(EncodeConfig(companions=0)).encode([EncodeJob(fact)])
    query = real_engine.prompt.fact_ids("Which words are there?")
    answers = []
    for inject in (True, False):
        buffer = KVBuffer.for_decoder(decoder, len(header) + len(fact) + len(query) + 16)
        if inject:
            place(decoder, [header, kv], buffer)
            hidden = extend(decoder, torch.tensor(query), buffer)
        else:
            hidden = extend(decoder, torch.tensor([*header.token_ids, *fact, *query]), buffer)
        tokens = []
        for _ in range(8):
            tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
            hidden = extend(decoder, torch.tensor(tokens[-1:]), buffer)
        answers.append(tokens)
    assert answers[0] == answers[1]


def test_all_facts_hot_is_a_full_prefill(lab: Lab) -> None:
    question = lab.question(0, lab_questions(lab)[0], 5)
    score = lab.score(question, [lab.header], question.facts)
    assert score.kl < 1e-5
    assert score.top1 == 1.0


def test_header_and_companions_bring_injection_closer_to_full_prefill(lab: Lab) -> None:
    """The order that everything rests on: bare is far, behind the header nearer, behind companions nearest."""
    ways = [Way("bare", header=False), Way("header"), Way("companions", companions=EncodeConfig().companions)]
    questions = [lab.question(i, qa, 10) for i, qa in enumerate(lab_questions(lab)[:4])]
    means = []
    for way in ways:
        lab.encode(way, (fact for question in questions for fact in question.facts))
        scores = [lab.score(question, lab.chunks(way, question.facts)).kl for question in questions]
        means.append(sum(scores) / len(scores))
    bare, header, companions = means
    assert companions < 0.6 * header < 0.6 * bare


def lab_questions(lab: Lab) -> list[Any]:
    (talk,) = load_locomo(Path(str(files("inferscale") / "data" / "demo_conversation.json")))
    return [qa for qa in talk.questions if qa.answer]
