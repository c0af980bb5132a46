"""Checks of what injection computes.

A fact encoded behind the header and injected must give the logits that the same tokens give as
prefilled text: as the whole prefix it is exact, so whatever differs is a fault of the installation
and never of the method (docs/design/encode.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F

from inferscale.compose import place
from inferscale.config import EncodeConfig
from inferscale.core import ChunkKV, render_fact
from inferscale.decoder.forward import KVBuffer, extend
from inferscale.doctor.installation import embed
from inferscale.doctor.report import Check
from inferscale.encode.base import EncodeJob
from inferscale.engine.prompt import Message
from inferscale.engine.transformers import TransformersEngine

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest accepted difference of two logits, relative to the largest logit. Rounding alone gave up to 1e-6
in float32 and 2e-2 in bfloat16 (SmolLM2-135M, and tiny models of every family and RoPE kind); the smallest
deliberate fault, keys rotated by one position too far, gave 8e-2, keys of the neighbouring token 4e-1."""
LEAST_AGREEMENT = 0.5
"""Share of next tokens that composed facts must agree on with prefilled text, or it is a warning."""
NEXT_TOKENS = 16
FACTS = (
    ("Mateo has a cat called Pixel.", "14 January 2025"),
    ("Mateo started a night course in boat electrics.", "14 January 2025"),
    ("Ingrid bought a used front-loading kiln in Bergen for 18,000 kroner.", "14 January 2025"),
    ("Ingrid's kiln arrived on 6 February 2025, three days late.", "8 February 2025"),
    ("Ingrid named her pottery studio Saltvind.", "8 February 2025"),
    ("Mateo is allergic to shrimp.", "8 February 2025"),
    ("Kafé Lanterna ordered forty red cups from Ingrid.", "22 March 2025"),
    ("Mateo bought the boat Halcón on 16 April 2025.", "19 April 2025"),
    ("Solveig owns the pontoon below Ingrid's loft.", "19 April 2025"),
    ("Amir plays the oud at the library evenings.", "7 June 2025"),
)
QUESTIONS = ("What is Mateo's cat called?", "When did Ingrid's kiln arrive?", "Which instrument does Amir play?")


@dataclass(frozen=True, slots=True)
class Difference:
    """Injected against prefilled, over `tokens` next tokens that the prefilled prompt chose greedily."""

    relative: float
    """Largest difference of two logits, relative to the largest logit."""
    agree: int
    """Next tokens that both choose."""
    tokens: int
    kl: float
    """Mean Kullback-Leibler divergence in nats, prefilled against injected."""


def check_decoder(engine: TransformersEngine) -> Check:
    """Our layer-by-layer decoder against the installed transformers' own forward pass."""
    ids = [*engine.prompt.header_ids, *engine.prompt.fact_ids(render_fact(*FACTS[0])), *_tail(engine, QUESTIONS[0])]
    with torch.no_grad():
        theirs = engine.decoder.model(_tensor(engine, ids)[None], use_cache=False).logits[0].float()
    hidden = extend(engine.decoder, _tensor(engine, ids), KVBuffer.for_decoder(engine.decoder, len(ids)))
    ours = engine.decoder.logits(hidden)
    found = _difference(theirs[-NEXT_TOKENS:], ours[-NEXT_TOKENS:])
    return _verdict("decoder", engine, found, "transformers' own forward pass")


def check_exact(engine: TransformersEngine) -> Check:
    """One fact injected behind the header against the same tokens prefilled."""
    (kv,) = _encode(engine, [engine.prompt.fact_ids(render_fact(*FACTS[0]))], [()])
    found = _compare(engine, [kv], QUESTIONS[0])
    return _verdict("exact", engine, found, "prefilled text, one fact behind the header")


def _verdict(name: str, engine: TransformersEngine, found: Difference, against: str) -> Check:
    limit = TOLERANCE[engine.spec.dtype]
    data = {**asdict(found), "tolerance": limit}
    detail = f"{found.agree} of {found.tokens} next tokens as {against}; logits differ by {found.relative:.1e}"
    if math.isnan(found.relative):
        return Check(name, "fault", "the model computes NaN; try --dtype float32", {"tolerance": limit})
    if found.relative > limit:
        return Check(name, "fault", f"{detail}, allowed are {limit:.0e}: do not inject with this installation", data)
    return Check(name, "ok", detail, data)


def check_composed(engine: TransformersEngine) -> Check:
    """Several facts in one prefix, made the default way: close to prefilled text, never exact."""
    config = EncodeConfig()
    facts = [engine.prompt.fact_ids(render_fact(*fact)) for fact in FACTS]
    vectors = embed([*(text for text, _ in FACTS), *QUESTIONS])
    near = np.argsort(vectors[: len(facts)] @ vectors[: len(facts)].T)
    companions = [
        tuple(facts[other] for other in [o for o in row[::-1] if o != at][: config.companions])
        for at, row in enumerate(near)
    ]
    kv = _encode(engine, facts, companions)
    found = []
    for question, vector in zip(QUESTIONS, vectors[len(facts) :], strict=True):
        best_last = np.argsort(vectors[: len(facts)] @ vector)
        found.append(_compare(engine, [kv[at] for at in best_last], question))
    agree, tokens = sum(d.agree for d in found), sum(d.tokens for d in found)
    kl = float(torch.tensor([d.kl for d in found]).mean())
    data = {"agree": agree, "tokens": tokens, "kl": kl, "facts": len(facts), "companions": config.companions}
    detail = f"{agree} of {tokens} next tokens as prefilled text, KL {kl:.2f} nats, {len(facts)} facts in one prefix"
    if agree < LEAST_AGREEMENT * tokens:
        return Check("composed", "warning", f"{detail}: try --hot 3, or mode text, with this model", data)
    return Check("composed", "note", detail, data)


def _encode(
    engine: TransformersEngine, facts: Sequence[tuple[int, ...]], companions: Sequence[tuple[tuple[int, ...], ...]]
) -> list[ChunkKV]:
    jobs = [EncodeJob(fact, None, others) for fact, others in zip(facts, companions, strict=True)]
    made = dict(fact for results in engine.encoder(EncodeConfig()).encode(jobs) for fact in results)
    return [made[at] for at in range(len(jobs))]


def _compare(engine: TransformersEngine, chunks: Sequence[ChunkKV], question: str) -> Difference:
    """Prefill header, chunks and question and decode greedily; then inject and follow the same tokens."""
    decoder, tail = engine.decoder, _tail(engine, question)
    parts = [engine.header, *chunks]
    prefix = [token for part in parts for token in part.token_ids]
    room = len(prefix) + len(tail) + NEXT_TOKENS
    text, injected = (KVBuffer.for_decoder(decoder, room) for _ in range(2))
    rows = [decoder.logits(extend(decoder, _tensor(engine, [*prefix, *tail]), text)[-1:])]
    chosen: list[int] = []
    while len(rows) < NEXT_TOKENS:
        chosen.append(int(rows[-1][0].argmax()))
        rows.append(decoder.logits(extend(decoder, _tensor(engine, chosen[-1:]), text)))
    place(decoder, parts, injected)
    hidden = extend(decoder, _tensor(engine, [*tail, *chosen]), injected)
    return _difference(torch.cat(rows), decoder.logits(hidden[-NEXT_TOKENS:]))


def _difference(expected: torch.Tensor, got: torch.Tensor) -> Difference:
    """Logits [tokens, vocab] of both ways."""
    kl = F.kl_div(got.log_softmax(-1), expected.log_softmax(-1), reduction="none", log_target=True).sum(-1).mean()
    return Difference(
        relative=float((expected - got).abs().max() / expected.abs().max()),
        agree=int((expected.argmax(-1) == got.argmax(-1)).sum()),
        tokens=len(expected),
        kl=float(kl),
    )


def _tail(engine: TransformersEngine, question: str) -> tuple[int, ...]:
    return engine.prompt.layout([Message("user", question)])[1]


def _tensor(engine: TransformersEngine, token_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=engine.decoder.device)
