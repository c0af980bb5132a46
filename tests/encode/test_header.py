"""The header cache: every header computed once, exact, and never more than the bound."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from inferscale.decoder.transformers import TransformersDecoder
from inferscale.encode import HeaderCache, encode_header
from tests.tiny import random_ids, tiny_decoder

DEFAULT = (5, 6, 7)


def header(seed: int, length: int = 4) -> tuple[int, ...]:
    return tuple(random_ids(length, seed=seed).tolist())


@contextmanager
def watched(decoder: TransformersDecoder, on_pass: Callable[[int], None] = lambda count: None) -> Iterator[list[int]]:
    """The number of tokens of every forward pass; `on_pass` is called in each with how many there were."""
    passes: list[int] = []
    embed = decoder.embed

    def counting(token_ids: Tensor) -> Tensor:
        passes.append(len(token_ids))
        on_pass(len(passes))
        return embed(token_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "embed", counting)
        yield passes


def test_a_header_is_exact_and_computed_once() -> None:
    decoder = tiny_decoder("qwen3", "yarn")
    cache = HeaderCache(decoder)
    with watched(decoder) as passes:
        first, again = cache.get(header(1)), cache.get(list(header(1)))
    assert passes == [4]
    assert again is first
    expected = encode_header(decoder, header(1))
    assert first.token_ids == header(1)
    torch.testing.assert_close(first.keys, expected.keys, rtol=0, atol=0)
    torch.testing.assert_close(first.values, expected.values, rtol=0, atol=0)


def test_the_least_recently_used_header_leaves_and_the_first_never() -> None:
    decoder = tiny_decoder()
    cache = HeaderCache(decoder, limit=3)
    cache.get(DEFAULT)
    kept = cache.get(header(1))
    cache.get(header(2))
    assert cache.get(header(1)) is kept
    cache.get(header(3))  # in place of 2
    assert len(cache) == 3
    with watched(decoder) as passes:
        assert cache.get(header(1)) is kept
        cache.get(header(3))
        cache.get(DEFAULT)
        assert passes == []
        cache.get(header(2))
        assert passes == [4]
        for seed in range(10, 30):
            cache.get(header(seed))
        assert len(passes) == 21
        cache.get(DEFAULT)
    assert len(passes) == 21
    assert len(cache) == 3


def test_headers_keep_to_their_bytes() -> None:
    decoder = tiny_decoder()
    one = encode_header(decoder, header(0, 10)).nbytes
    cache = HeaderCache(decoder, max_bytes=3 * one)
    for seed in range(8):
        cache.get(header(seed, 10))
        assert len(cache) <= 3
    huge = cache.get(header(9, 50))
    assert cache.get(header(9, 50)) is huge
    assert len(cache) == 2  # the first, and the newest although it alone is too large
    cache.get(header(8, 10))
    assert len(cache) == 2


def test_twenty_threads_that_ask_at_once_compute_a_header_once() -> None:
    decoder = tiny_decoder()
    cache = HeaderCache(decoder)
    ready = threading.Barrier(20)

    def ask(number: int) -> object:
        ready.wait()
        return cache.get(header(number % 2))

    with watched(decoder) as passes, ThreadPoolExecutor(20) as pool:
        found = list(pool.map(ask, range(20)))
    assert passes == [4, 4]
    assert len({id(kv) for kv in found}) == 2


def test_a_failure_is_raised_to_who_computed_and_the_next_one_tries_again() -> None:
    decoder = tiny_decoder()
    cache = HeaderCache(decoder)
    ready = threading.Barrier(8)

    def fail_first(count: int) -> None:
        if count == 1:
            raise MemoryError

    def ask(_: int) -> object:
        ready.wait()
        try:
            return cache.get(DEFAULT)
        except MemoryError:
            return None

    with watched(decoder, fail_first) as passes, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert found.count(None) == 1
    assert passes == [3, 3]
    assert len({id(kv) for kv in found if kv is not None}) == 1
