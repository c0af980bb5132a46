"""Exact and streaming encoding against dense references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale.core import ChunkKV
from inferscale.decoder.forward import KVBuffer, extend
from inferscale.decoder.transformers import TransformersDecoder
from inferscale.encode import EncodeJob, encode_header
from inferscale.encode.base import Encoder
from inferscale.encode.exact import ExactEncoder
from inferscale.encode.streaming import StreamingEncoder
from tests.tiny import CASES, random_ids, tiny_decoder

HEADER = tuple(random_ids(9, seed=99).tolist())
NO_HEADER = ChunkKV((), torch.empty(3, 0, 2, 16), torch.empty(3, 0, 2, 16))


def tokens(n: int, seed: int) -> tuple[int, ...]:
    return tuple(random_ids(n, seed=seed).tolist())


def dense(
    decoder: TransformersDecoder, before: tuple[int, ...], fact: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pre-RoPE KV of `fact` behind `before`, by transformers' own modules and hooks."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    hooks = []
    for layer in decoder.model.model.layers:
        module = getattr(layer.self_attn, "k_norm", layer.self_attn.k_proj)
        hooks.append(module.register_forward_hook(lambda _m, _i, out: keys.append(out.detach().clone())))
        hooks.append(layer.self_attn.v_proj.register_forward_hook(lambda _m, _i, out: values.append(out.clone())))
    with torch.no_grad():
        decoder.model(torch.tensor([before + fact]), use_cache=False)
    for hook in hooks:
        hook.remove()
    shape = (len(before) + len(fact), decoder.spec.kv_heads, decoder.spec.head_dim)
    cut = slice(len(before), None)
    return torch.stack([k.reshape(shape)[cut] for k in keys]), torch.stack([v.reshape(shape)[cut] for v in values])


def results(encoder: Encoder, jobs: list[EncodeJob], turns: list[tuple[int, ...]]) -> list[ChunkKV]:
    found = dict(fact for results in encoder.encode(jobs, turns) for fact in results)
    assert sorted(found) == list(range(len(jobs)))
    return [found[i] for i in range(len(jobs))]


def assert_same(a: ChunkKV, keys: torch.Tensor, values: torch.Tensor) -> None:
    torch.testing.assert_close(a.keys, keys, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(a.values, values, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_the_header_is_exact(family: str, kind: str) -> None:
    decoder = tiny_decoder(family, kind)
    header = encode_header(decoder, HEADER)
    assert_same(header, *dense(decoder, (), HEADER))


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_exact_encoding_is_a_prefill_of_header_window_companions_and_fact(family: str, kind: str) -> None:
    decoder = tiny_decoder(family, kind)
    turns = [tokens(n, seed=n) for n in (3, 1, 7, 5)]
    companions = (tokens(4, 31), tokens(6, 32))
    jobs = [
        EncodeJob(tokens(5, 41), turn=3, companions=companions),
        EncodeJob(tokens(1, 42), turn=1),
        EncodeJob(tokens(8, 43), turn=0, companions=companions[:1]),
        EncodeJob(tokens(2, 44), companions=companions),
    ]
    windows = [turns[1] + turns[2], turns[0], (), ()]
    encoder = ExactEncoder(decoder, encode_header(decoder, HEADER), window=2, batch_tokens=20)
    for kv, job, window in zip(results(encoder, jobs, turns), jobs, windows, strict=True):
        assert kv.token_ids == job.fact
        before = HEADER + window + tuple(t for c in job.companions for t in c)
        assert_same(kv, *dense(decoder, before, job.fact))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    at=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    batch=st.integers(1, 60),
    case=st.sampled_from(CASES),
)
def test_streaming_equals_exact_while_the_window_reaches_the_start(
    lengths: list[int], at: list[int], batch: int, case: tuple[str, str]
) -> None:
    decoder = tiny_decoder(*case)
    turns = [tokens(n, seed=i) for i, n in enumerate(lengths)]
    jobs = [
        EncodeJob(tokens(1 + i % 4, 50 + i), turn=t % len(turns), companions=(tokens(3, 70 + i),) * (i % 3))
        for i, t in enumerate(at)
    ]
    header = encode_header(decoder, HEADER)
    exact = ExactEncoder(decoder, header, window=9)
    streaming = StreamingEncoder(decoder, header, window=9, batch_tokens=batch)
    for a, b in zip(results(exact, jobs, turns), results(streaming, jobs, turns), strict=True):
        assert_same(b, a.keys, a.values)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=9),
    at=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    window=st.integers(1, 4),
    batches=st.tuples(st.integers(1, 12), st.integers(13, 64)),
)
def test_how_a_walk_is_cut_into_passes_does_not_matter(
    lengths: list[int], at: list[int], window: int, batches: tuple[int, int]
) -> None:
    """Without a header only distances matter, and those are the same however the walk is cut."""
    decoder = tiny_decoder("qwen3", "yarn")
    turns = [tokens(n, seed=i) for i, n in enumerate(lengths)]
    every = [EncodeJob(tokens(2, 80 + t), turn=t) for t in range(len(turns))]  # no stretch is skipped
    jobs = every + [EncodeJob(tokens(2, 50 + i), turn=t % len(turns)) for i, t in enumerate(at)]
    one, two = (StreamingEncoder(decoder, NO_HEADER, window=window, batch_tokens=b) for b in batches)
    for a, b in zip(results(one, jobs, turns)[1:], results(two, jobs, turns)[1:], strict=True):
        assert_same(b, a.keys, a.values)


def test_streaming_sees_header_and_window_only_in_one_pass() -> None:
    """One pass over everything against a dense forward with the same mask, written out by hand."""
    decoder = tiny_decoder("llama", "llama3")
    turns, window = [tokens(n, seed=n) for n in (3, 5, 2, 4, 3)], 2
    job = EncodeJob(tokens(4, 40), turn=4)
    header = encode_header(decoder, HEADER)
    (kv,) = results(StreamingEncoder(decoder, header, window=window, batch_tokens=64), [job], turns)
    # The walk starts at the window of the first job: turns 2 and 3.
    assert_same(kv, *dense(decoder, HEADER + turns[2] + turns[3], job.fact))
    first = EncodeJob(tokens(2, 41), turn=2)
    _, kv = results(StreamingEncoder(decoder, header, window=window, batch_tokens=64), [first, job], turns)
    owner = [-1] * len(HEADER) + [t for t in range(4) for _ in turns[t]] + [4] * len(job.fact)
    ids = HEADER + turns[0] + turns[1] + turns[2] + turns[3] + job.fact
    n = len(ids)
    allowed = torch.tensor(
        [[j <= i and (owner[j] < 0 or owner[j] >= owner[i] - window) for j in range(n)] for i in range(n)]
    )
    bias = torch.zeros(n, n).masked_fill(~allowed, float("-inf"))
    values: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda _m, _i, out: values.append(out.detach().clone()))
        for layer in decoder.model.model.layers
    ]
    with torch.no_grad():
        decoder.model(torch.tensor([ids]), attention_mask=bias[None, None], use_cache=False)
    for hook in hooks:
        hook.remove()
    expected = torch.stack([v.reshape(n, 2, 16)[-len(job.fact) :] for v in values])
    torch.testing.assert_close(kv.values, expected, rtol=1e-5, atol=2e-5)


def test_context_that_does_not_fit_is_left_out_the_least_useful_first() -> None:
    decoder = tiny_decoder("llama", "default", max_position_embeddings=64)
    header = encode_header(decoder, HEADER)
    turns = [tokens(14, seed=i) for i in range(6)]
    fact, near, far = tokens(20, 9), tokens(6, 4), tokens(40, 3)
    job = EncodeJob(fact, turn=5, companions=(near, far))  # the closest first
    (kv,) = results(ExactEncoder(decoder, header, window=5), [job], turns)
    # 64 positions: header 9, fact 20, near 6 leave 29, which is two turns of 14 and not `far`.
    assert_same(kv, *dense(decoder, HEADER + turns[3] + turns[4] + near, fact))
    (kv,) = results(StreamingEncoder(decoder, header, window=5), [job], turns)
    assert bool(kv.keys.isfinite().all())


def test_a_turn_longer_than_the_context_is_clipped_and_harms_nothing() -> None:
    decoder = tiny_decoder("llama", "default", max_position_embeddings=64)
    header = encode_header(decoder, HEADER)
    turns = [tokens(500, 1), tokens(3, 2)]
    for kind in (ExactEncoder, StreamingEncoder):
        (kv,) = results(kind(decoder, header, window=2), [EncodeJob(tokens(4, 5), turn=1)], turns)
        assert_same(kv, *dense(decoder, HEADER + turns[0][-16:], tokens(4, 5)))


def test_one_chunk_behind_the_header_is_injected_exactly() -> None:
    """Header and one fact encoded behind nothing but the header are the KV of a prefill of both."""
    decoder = tiny_decoder("qwen2", "yarn")
    header = encode_header(decoder, HEADER)
    fact = tokens(11, 3)
    (kv,) = results(ExactEncoder(decoder, header), [EncodeJob(fact)], [])
    buffer = KVBuffer.for_decoder(decoder, 20)
    extend(decoder, torch.tensor(HEADER + fact), buffer)
    at = torch.arange(9, 20)
    for layer in range(decoder.spec.layers):
        torch.testing.assert_close(decoder.rotate(kv.keys[layer], at), buffer.keys[layer, 9:20], rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(kv.values[layer], buffer.values[layer, 9:20], rtol=1e-5, atol=2e-5)
