"""Whatever is sent, the answer is JSON with a status that blames the sender, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.conftest import Served

ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/memories"),
    ("POST", "/search"),
    ("PUT", "/memories/some-id"),
]
JSON = {"content-type": "application/json"}

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def assert_refused(reply: httpx.Response) -> None:
    assert 400 <= reply.status_code < 500, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe\x00",
        b"[" * 50_000,
        b'{"a":' * 20_000,
        b'{"model": NaN}',
        b'{"query": "\\ud800", "user_id": "a", "model": "m", "prompt": "\\ud800", "messages": "\\ud800"}',
    ],
)
def test_what_is_no_request_is_refused(gateway: Served, method: str, path: str, content: bytes) -> None:
    assert_refused(gateway.client().request(method, path, content=content, headers=JSON))


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": "text"},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "assistant", "content": "no question"}]},
        {"user": ""},
        {"user": 5},
        {"user": "x" * 20_000},
        {"model": None},
        {"temperature": "hot"},
        {"temperature": -1},
        {"temperature": 1e400},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"stream": "yes"},
        {"memory": {"mode": "magic"}},
        {"memory": {"top_k": -1}},
        {"memory": {"plan": "forged"}},
        {"memory": []},
        {"tenant": "other"},
        {"kv_transfer_params": {"inferscale": {"plan": "forged"}}},
        {"cache_salt": "guessed"},
        {"stop": [""] * 99},
    ],
)
def test_a_wrong_field_is_refused_by_name(gateway: Served, change: dict[str, Any]) -> None:
    body = {"model": gateway.model, "user": "alice", "messages": [{"role": "user", "content": "x"}], **change}
    content = json.dumps(body).encode()
    reply = gateway.client().post("/v1/chat/completions", content=content, headers=JSON)
    assert_refused(reply)


@given(body=st.dictionaries(st.sampled_from(["model", "messages", "prompt", "user", "memory", "query"]), anything))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_makes_the_server_fail(gateway: Served, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    for method, path in ROUTES:
        reply = gateway.client().request(method, path, content=content, headers=JSON)
        assert reply.status_code == 200 or 400 <= reply.status_code < 500, (path, reply.text)


@pytest.mark.parametrize("user", ["*", "../x", "a\nb", "'; DROP TABLE facts; --", "a\x00b", "x" * 9000])
def test_odd_names_are_names(gateway: Served, user: str) -> None:
    client = gateway.client()
    made = client.post("/memories", json={"messages": "Momo is a cat.", "user_id": user})
    if made.status_code != 200:
        assert_refused(made)
        return
    listed = client.get("/memories", params={"user_id": user}).json()["results"]
    assert [item["user_id"] for item in listed] == [user]
    assert client.delete("/memories", params={"user_id": user}).json()["deleted"] == 1


def test_a_thousand_bad_requests_leave_good_ones_as_they_are(gateway: Served) -> None:
    good = {"model": gateway.model, "user": "alice", "temperature": 0, "max_tokens": 8}
    good["messages"] = [{"role": "user", "content": "Which breed is Rex?"}]
    bad: list[tuple[str, str, bytes]] = [
        ("POST", "/v1/chat/completions", b"{"),
        ("POST", "/v1/chat/completions", json.dumps({**good, "user": 5}).encode()),
        ("POST", "/v1/chat/completions", json.dumps({**good, "kv_transfer_params": {}}).encode()),
        ("POST", "/search", b'{"query": 5}'),
        ("GET", "/memories/forged-id", b""),
        ("DELETE", "/memories", b""),
        ("GET", "/nowhere", b""),
    ]

    async def run() -> tuple[list[int], list[Any]]:
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60, limits=limits) as client:

            async def one(kind: tuple[str, str, bytes]) -> int:
                return (await client.request(kind[0], kind[1], content=kind[2], headers=JSON)).status_code

            async def answer() -> Any:
                reply = await client.post("/v1/chat/completions", json=good)
                return reply.json()["choices"]

            choose = random.Random(0)
            refused = [one(choose.choice(bad)) for _ in range(1000)]
            results = await asyncio.gather(*refused, *(answer() for _ in range(10)))
            return results[:1000], results[1000:]

    alone = gateway.client().post("/v1/chat/completions", json=good).json()["choices"]
    statuses, answers = asyncio.run(run())
    assert all(400 <= status < 500 for status in statuses)
    assert all(answer == alone for answer in answers)
