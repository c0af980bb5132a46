"""Too much at once, too large, gone in the middle: slots, bodies, clients that leave."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from inferscale.config import ServeConfig
from inferscale.errors import ConfigError
from inferscale.serve import ApiKeys, listen
from tests.serve.conftest import Serve, Served, until

LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me all."}], "temperature": 0, "max_tokens": 400}


def ask(gateway: Served, **options: Any) -> httpx.Response:
    body = {**LONG, "model": gateway.model, **options}
    return gateway.client().post("/v1/chat/completions", json=body)


@pytest.fixture(scope="module")
def narrow(serve_memory: Serve) -> Served:
    """One answer at once, one that waits, 4 kB a body."""
    return serve_memory(max_concurrent=1, max_waiting=1, max_body_bytes=4096)


def events(lines: Iterator[str]) -> Iterator[Any]:
    return (json.loads(line[6:]) for line in lines if line.startswith("data: {"))


def test_one_is_answered_one_waits_and_one_is_told_to_come_back(narrow: Served) -> None:
    body = {**LONG, "model": narrow.model, "stream": True}
    with (
        ThreadPoolExecutor() as pool,
        narrow.client().stream("POST", "/v1/chat/completions", json=body) as first,
    ):
        lines = first.iter_lines()
        next(events(lines))
        second = pool.submit(ask, narrow, max_tokens=2)
        assert until(lambda: narrow.metric("inferscale_answers_waiting") == 1)
        third = ask(narrow)
        assert (third.status_code, third.json()["error"]["code"]) == (429, "server_busy")
        assert third.headers["retry-after"] == "1"
        assert [event for event in events(lines) if event["choices"][0]["finish_reason"]]
        assert second.result(30).status_code == 200
    assert until(lambda: narrow.metric("inferscale_answers_busy") == 0)


def test_a_client_that_leaves_frees_its_slot(narrow: Served) -> None:
    for stream in (True, False):
        body = {**LONG, "model": narrow.model, "stream": stream}
        with httpx.Client(base_url=narrow.url, timeout=0.3 if not stream else 30) as client:
            try:
                with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                    next(reply.iter_lines())
            except httpx.ReadTimeout:
                assert not stream
        began = time.monotonic()
        assert ask(narrow, max_tokens=2).status_code == 200
        assert time.monotonic() - began < 20
    assert until(lambda: narrow.metric("inferscale_answers_busy") == 0)


def test_a_body_over_the_limit_is_not_read(narrow: Served) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 1024

    client = narrow.client()
    big = b'{"query": "' + b"x" * 5000 + b'"}'
    headers = {"content-type": "application/json"}
    declared = client.post("/search", content=big, headers=headers)
    assert (declared.status_code, declared.json()["error"]["code"]) == (413, "body_too_large")
    try:
        chunked = client.post("/search", content=endless(), headers=headers)
    except (httpx.WriteError, httpx.ReadError):  # the connection was closed under our hands
        return
    assert (chunked.status_code, chunked.json()["error"]["code"]) == (413, "body_too_large")


def test_an_engine_that_is_down_is_said_so(serve_memory: Serve) -> None:
    trouble: list[str | None] = [None]
    gateway = serve_memory(health=lambda: trouble[0])
    assert gateway.client().get("/health").json() == {"status": "ok"}
    trouble[0] = "vLLM is starting."
    reply = gateway.client().get("/health")
    assert (reply.status_code, reply.json()["reason"]) == (503, "vLLM is starting.")
    assert gateway.metric("inferscale_up") == 0


def test_a_port_that_is_taken_is_one_clear_error() -> None:
    with listen(ServeConfig(port=0)) as first, pytest.raises(ConfigError, match="--port"):
        listen(ServeConfig(port=first.getsockname()[1]))


@pytest.mark.parametrize("keys", [{"short": "acme"}, {"a b" * 10: "acme"}, {"k" * 32: ""}, {"ключ" * 8: "acme"}])
def test_keys_that_cannot_be_used_are_refused_at_start(keys: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        ApiKeys(keys)
