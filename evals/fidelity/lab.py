"""One conversation on the bench: encode its facts in many ways, inject them, compare with full prefill.

The measure is the divergence KL(full ‖ variant) of the next-token distributions over the gold
answer's tokens (teacher-forced), the share of tokens whose most likely continuation agrees, and the
answer's log-likelihood.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inferscale.compose.rotate import place
from inferscale.config import EncodeConfig
from inferscale.core import ChunkKV, render_fact
from inferscale.decoder.base import LayerwiseDecoder
from inferscale.decoder.forward import KVBuffer, extend
from inferscale.encode import EncodeJob, create_encoder, encode_header
from inferscale.engine.prompt import Message, PromptFormat
from inferscale.facts.locomo import LocomoConversation, LocomoQuestion
from inferscale.index.embed import Embedder


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make a fact's KV. `header` False encodes bare, as the papers do."""

    name: str
    header: bool = True
    window: int = 0
    companions: int = 0
    mode: str = "exact"
    closest: str = "first"


@dataclass(frozen=True, slots=True)
class Score:
    """One question answered from one set of KV: `kl` in nats a token, `top1` a share, `nll` in nats a token."""

    kl: float
    top1: float
    nll: float


@dataclass(frozen=True, slots=True)
class Question:
    """A question ready to be scored: fact indices best last, token ids, the reference distributions."""

    number: int
    memory_tokens: int
    facts: tuple[int, ...]
    tail: tuple[int, ...]
    answer: tuple[int, ...]
    reference: Tensor
    """Log-probabilities [answer tokens, vocab] after full prefill."""
    nll: float


class Lab:
    """Scores ways of encoding on one conversation."""

    def __init__(
        self,
        decoder: LayerwiseDecoder,
        prompt: PromptFormat,
        embedder: Embedder,
        conversation: LocomoConversation,
        batch_tokens: int = 768,
    ) -> None:
        self.decoder = decoder
        self.prompt = prompt
        self.embedder = embedder
        self.batch_tokens = batch_tokens
        lines = [render_fact(fact.text, fact.time) for fact in conversation.facts]
        self.facts = [prompt.fact_ids(line) for line in lines]
        self.vectors = embedder.embed(lines)
        self.turns = [prompt.fact_ids(turn.line) for turn in conversation.turns]
        place_of = {turn.id: i for i, turn in enumerate(conversation.turns)}
        self.turn_of = [place_of.get(fact.turn_id) for fact in conversation.facts]
        self.header = encode_header(decoder, prompt.header_ids)
        self._kv: dict[tuple[Way, int], ChunkKV] = {}

    def retrieve(self, question: str, k: int) -> tuple[int, ...]:
        """Indices of the k most similar facts, best last."""
        scores = self.vectors @ self.embedder.embed([question])[0]
        return tuple(int(i) for i in np.argsort(-scores, kind="stable")[:k][::-1])

    def companions(self, fact: int, count: int, closest: str) -> list[int]:
        """The `count` facts most similar to `fact`, the closest last or first."""
        scores = self.vectors @ self.vectors[fact]
        scores[fact] = -np.inf
        nearest = [int(i) for i in np.argsort(-scores, kind="stable")[:count]]
        return nearest[::-1] if closest == "last" else nearest

    def encode(self, way: Way, facts: Iterable[int]) -> None:
        """Make the KV of `facts` that is not there yet."""
        missing = [i for i in dict.fromkeys(facts) if (way, i) not in self._kv]
        empty = self.header.keys[:, :0]
        header = self.header if way.header else ChunkKV((), empty, empty)
        config = EncodeConfig(window=way.window, mode=way.mode, batch_tokens=self.batch_tokens)
        jobs = [
            EncodeJob(
                self.facts[i],
                turn=self.turn_of[i] if way.window else None,
                companions=tuple(self.facts[c] for c in self.companions(i, way.companions, way.closest)),
            )
            for i in missing
        ]
        for results in create_encoder(self.decoder, header, config).encode(jobs, self.turns):
            self._kv.update({(way, missing[index]): kv for index, kv in results})

    def chunks(self, way: Way, facts: Sequence[int]) -> list[ChunkKV]:
        """The encoded facts, header first."""
        return [self.header, *(self._kv[way, i] for i in facts)]

    def question(self, number: int, qa: LocomoQuestion, k: int) -> Question:
        """Retrieve for a question and compute its reference by full prefill."""
        facts = self.retrieve(qa.question, k)
        tail = self.prompt.layout([Message("user", qa.question)])[1]
        answer = (*self.prompt.fact_ids(str(qa.answer)), int(self.prompt.tokenizer.eos_token_id))
        prefix = [*self.prompt.header_ids, *(t for i in facts for t in self.facts[i])]
        buffer = KVBuffer.for_decoder(self.decoder, len(prefix) + len(tail) + len(answer))
        extend(self.decoder, self._ids(prefix), buffer)
        reference = self._answer(tail, answer, buffer)
        memory_tokens = sum(len(self.facts[i]) for i in facts)
        return Question(number, memory_tokens, facts, tail, answer, reference, _nll(reference, answer))

    def score(self, question: Question, chunks: Sequence[ChunkKV], hot: Sequence[int] = ()) -> Score:
        """Inject `chunks`, prefill the `hot` facts as text, and compare with the reference."""
        suffix = tuple(t for i in hot for t in self.facts[i]) + question.tail
        length = sum(map(len, chunks)) + len(suffix) + len(question.answer)
        buffer = KVBuffer.for_decoder(self.decoder, length)
        place(self.decoder, chunks, buffer)
        found = self._answer(suffix, question.answer, buffer)
        reference = question.reference
        return Score(
            kl=float((reference.exp() * (reference - found)).sum(-1).mean()),
            top1=float((reference.argmax(-1) == found.argmax(-1)).float().mean()),
            nll=_nll(found, question.answer),
        )

    def _answer(self, suffix: tuple[int, ...], answer: tuple[int, ...], buffer: KVBuffer) -> Tensor:
        """Log-probabilities [answer tokens, vocab] of the teacher-forced answer behind suffix."""
        hidden = extend(self.decoder, self._ids([*suffix, *answer[:-1]]), buffer)
        return self.decoder.logits(hidden[len(suffix) - 1 :]).log_softmax(-1)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self.decoder.device)


def _nll(log_probabilities: Tensor, answer: Sequence[int]) -> float:
    return float(-log_probabilities[torch.arange(len(answer)), torch.tensor(answer)].mean())
