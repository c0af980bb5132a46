"""The table of 18 cases in bfloat16: a memory injected as one exact chunk answers as the same memory prefilled.

Two ways to round may part where the model itself is undecided, so where two answers part, a reference in float32
says how undecided: they count as equivalent if it gives both next tokens the same probability, but for a tenth of
a nat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inferscale.core import Scope
from inferscale.decoder.forward import KVBuffer, extend
from inferscale.engine.base import Generation, Request
from inferscale.engine.transformers import TransformersEngine
from tests.engine.vllm.kit import Desk, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TIE = 0.1
"""Nats between two tokens that count as equally probable."""

MEMORIES = {
    "nora": [
        "- The user's name is Nora Field and she is 34 years old.\n",
        "- Nora lives in Bergen with her dog, a collie named Rex.\n",
        "- Nora works as a marine biologist and studies kelp forests.\n",
        "- Nora is allergic to peanuts and does not eat meat.\n",
        "- Nora plays the cello in a small orchestra on Thursdays.\n",
        "- Nora wants to sail to Iceland next summer with her brother Ivar.\n",
    ],
    "tariq": [
        "- The user's name is Tariq Haddad and he is 52 years old.\n",
        "- Tariq lives in Lisbon with two cats named Salt and Pepper.\n",
        "- Tariq works as a train driver on the night line to Porto.\n",
        "- Tariq drinks no coffee after noon because he sleeps badly.\n",
        "- Tariq collects old railway clocks and repairs them at home.\n",
        "- Tariq wants to learn to bake bread for his daughter's wedding.\n",
    ],
    "mei": [
        "- The user's name is Mei Tanaka and she is 21 years old.\n",
        "- Mei lives in Toronto and keeps a parrot named Mango.\n",
        "- Mei works at a bicycle shop while she studies architecture.\n",
        "- Mei is afraid of heights and never takes the elevator.\n",
        "- Mei runs ten kilometres every morning along the lake.\n",
        "- Mei wants to build a house of straw and clay for her parents.\n",
    ],
}
FACTUAL = ["What is my name?", "Which city do I live in?", "What is my job?"]
OPEN = [
    "What would be a good present for me?",
    "Describe me to a stranger in a few sentences.",
    "Plan a free Saturday for me.",
]


@pytest.fixture(scope="module")
def desk(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """SmolLM2-135M-Instruct in vLLM, bfloat16."""
    engine = start(model_path, tmp_path_factory.mktemp("table"), dtype="bfloat16")
    yield Desk(engine)
    engine.close()


def next_token(reference: TransformersEngine, token_ids: Sequence[int]) -> Tensor:
    """Log-probabilities [vocab] of the token after these."""
    buffer = KVBuffer.for_decoder(reference.decoder, len(token_ids))
    hidden = extend(reference.decoder, torch.tensor(token_ids), buffer)
    return reference.decoder.logits(hidden[-1:])[0].log_softmax(-1)


def gap(reference: TransformersEngine, request: Request, a: Generation, b: Generation) -> float | None:
    """Nats between the first two tokens that differ, None if none do."""
    if (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason):
        return None
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a.token_ids, b.token_ids, strict=False))))
    probable = next_token(reference, (*request.prompt_ids, *a.token_ids[:same]))
    ends = probable[sorted(reference.ends)].max()  # an answer that is over goes on with an end
    first, second = (probable[x.token_ids[same]] if same < len(x.token_ids) else ends for x in (a, b))
    return float((first - second).abs())


def test_every_case_is_answered_as_its_text(
    desk: Desk, real_engine: TransformersEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    table: Counter[str] = Counter()
    answers: dict[str, set[str]] = {}
    rows = []
    for user, lines in MEMORIES.items():
        scope = Scope(user=user)
        memory = [token for line in lines for token in desk.engine.prompt.fact_ids(line)]
        facts = desk.remember_ids([memory], scope)
        for question in FACTUAL + OPEN:
            plan = desk.plan(facts, scope)
            request = desk.request(plan, question, max_tokens=24 if question in FACTUAL else 64)
            injected = desk.engine.generate(request)
            text = desk.engine.generate(Request(request.prompt_ids, None, request.sampling))
            assert (injected.fallback, injected.injected_tokens) == (None, len(plan.token_ids))
            nats = gap(real_engine, request, injected, text)
            outcome = "identical" if nats is None else "equivalent" if nats <= TIE else "different"
            table[outcome] += 1
            answers.setdefault(question, set()).add(injected.text)
            apart = "" if nats is None else f" ({nats:.3f} nats)"
            rows.append(f"{user:6} {question:46} {outcome}{apart}: {injected.text!r} | {text.text!r}")
    with capsys.disabled():
        print("\n" + "\n".join(rows) + f"\n{dict(table)}")
    assert table.total() == 18
    assert table["different"] == 0
    assert {question: len(texts) for question, texts in answers.items()} == dict.fromkeys(answers, len(MEMORIES))
