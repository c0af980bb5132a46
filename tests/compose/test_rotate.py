"""The fast composition against its trivial twin and against a plain prefill."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale.compose import place, place_naive
from inferscale.core import ChunkKV
from inferscale.decoder.forward import KVBuffer, extend
from inferscale.encode import encode_header
from tests.tiny import CASES, random_ids, tiny_decoder


def chunk(decoder, n: int, seed: int, dtype: torch.dtype = torch.float32) -> ChunkKV:  # type: ignore[no-untyped-def]
    shape = (decoder.spec.layers, n, decoder.spec.kv_heads, decoder.spec.head_dim)
    rng = torch.Generator().manual_seed(seed)
    ids = tuple(random_ids(n, seed).tolist())
    return ChunkKV(ids, torch.randn(shape, generator=rng).to(dtype), torch.randn(shape, generator=rng).to(dtype))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=8),
    before=st.integers(0, 9),
    case=st.sampled_from(CASES),
    half=st.booleans(),
)
def test_place_equals_its_trivial_twin(lengths: list[int], before: int, case: tuple[str, str], half: bool) -> None:
    decoder = tiny_decoder(*case)
    dtype = torch.bfloat16 if half else torch.float32  # stored in half, placed into a float32 cache
    parts = [chunk(decoder, n, seed, dtype) for seed, n in enumerate(lengths)]
    fast, slow = (KVBuffer.for_decoder(decoder, before + sum(lengths) + 3) for _ in range(2))
    for buffer in (fast, slow):
        place_naive(decoder, [chunk(decoder, before, 77)] if before else [], buffer)
    place(decoder, parts, fast)
    place_naive(decoder, parts, slow)
    assert fast.length == slow.length == before + sum(lengths)
    torch.testing.assert_close(fast.keys[:, : fast.length], slow.keys[:, : slow.length], rtol=1e-6, atol=1e-6)
    assert torch.equal(fast.values[:, : fast.length], slow.values[:, : slow.length])


def test_place_leaves_the_chunks_as_they_were() -> None:
    decoder = tiny_decoder()
    part = chunk(decoder, 11, 0)
    keys, values = part.keys.clone(), part.values.clone()
    place(decoder, [part], KVBuffer.for_decoder(decoder, 11))
    assert torch.equal(part.keys, keys)
    assert torch.equal(part.values, values)


@pytest.mark.parametrize(("family", "kind"), CASES)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65])
def test_one_chunk_as_the_whole_prefix_gives_the_logits_of_a_prefill(family: str, kind: str, n: int) -> None:
    decoder = tiny_decoder(family, kind)
    ids, query = random_ids(n), random_ids(5, seed=1)
    injected, prefilled = (KVBuffer.for_decoder(decoder, n + 5) for _ in range(2))
    place(decoder, [encode_header(decoder, ids.tolist())], injected)
    found = decoder.logits(extend(decoder, query, injected))
    expected = decoder.logits(extend(decoder, torch.cat([ids, query]), prefilled)[n:])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
