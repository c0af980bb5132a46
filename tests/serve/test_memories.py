"""Mem0's routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Serve, Served


@pytest.fixture
def client(gateway: Served) -> httpx.Client:
    return gateway.client()


def add(client: httpx.Client, text: str, **owners: str) -> str:
    reply = client.post("/memories", json={"messages": [{"role": "user", "content": text}], **owners})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["results"][0]["id"])


def test_a_memorys_life(client: httpx.Client) -> None:
    made = add(client, "Rex is a collie.", user_id="life")
    assert client.get(f"/memories/{made}").json()["user_id"] == "life"
    found = client.post("/search", json={"query": "dog breed", "user_id": "life"}).json()["results"]
    assert [item["id"] for item in found] == [made]
    assert found[0]["score"] > 0
    changed = client.put(f"/memories/{made}", json={"text": "Rex is a poodle.", "metadata": {"sure": True}})
    assert changed.status_code == 200
    shown = client.get(f"/memories/{made}").json()
    assert shown["memory"] == "Rex is a poodle."
    assert shown["metadata"] == {"sure": True}
    events = [entry["event"] for entry in client.get(f"/memories/{made}/history").json()]
    assert events == ["ADD", "UPDATE"]
    assert client.get("/memories", params={"user_id": "life"}).json()["results"][0]["id"] == made
    assert client.delete(f"/memories/{made}").status_code == 200
    gone = client.get(f"/memories/{made}")
    assert gone.status_code == 404
    assert gone.json()["error"]["code"] == "memory_not_found"


def test_delete_all_reaches_its_owner_only(client: httpx.Client) -> None:
    add(client, "One.", user_id="left")
    add(client, "Two.", user_id="gone")
    assert client.delete("/memories", params={"user_id": "gone"}).json()["deleted"] == 1
    assert client.get("/memories", params={"user_id": "gone"}).json()["results"] == []
    assert len(client.get("/memories", params={"user_id": "left"}).json()["results"]) == 1


@pytest.mark.parametrize("owners", [{}, {"user_id": ""}, {"user": "left"}, {"user_id": "left", "rnu_id": "x"}])
def test_a_deletion_that_may_not_mean_what_it_says_deletes_nothing(
    client: httpx.Client, owners: dict[str, str]
) -> None:
    add(client, "Kept.", user_id="left")
    reply = client.delete("/memories", params=owners)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert client.get("/memories", params={"user_id": "left"}).json()["results"]


def test_search_takes_metadata_and_limits(client: httpx.Client) -> None:
    for colour in ("red", "blue"):
        body = {"messages": f"A {colour} car.", "user_id": "cars", "metadata": {"colour": colour}, "infer": False}
        assert client.post("/memories", json=body).status_code == 200
    body: dict[str, Any] = {"query": "car", "user_id": "cars"}
    assert len(client.post("/search", json=body).json()["results"]) == 2
    assert len(client.post("/search", json={**body, "top_k": 1}).json()["results"]) == 1
    (red,) = client.post("/search", json={**body, "filters": {"colour": "red"}}).json()["results"]
    assert red["metadata"] == {"colour": "red"}
    other = client.post("/search", json={**body, "filters": {"user_id": "someone else"}})
    assert other.status_code == 400


KEYS = {"a" * 32: "acme", "b" * 32: "bolt"}


def test_a_key_reaches_its_tenants_memories_and_no_others_by_any_field(serve_memory: Serve) -> None:
    gateway = serve_memory(keys=KEYS)
    acme, bolt = (gateway.client(key) for key in KEYS)
    secret = add(acme, "The code is 4711.", user_id="alice")
    own = add(bolt, "The sky is blue.", user_id="alice")
    for method, path, body in [
        ("GET", f"/memories/{secret}", None),
        ("PUT", f"/memories/{secret}", {"text": "changed"}),
        ("DELETE", f"/memories/{secret}", None),
        ("GET", f"/memories/{secret}/history", None),
    ]:
        reply = bolt.request(method, path, json=body)
        assert reply.status_code == 404 or reply.json() == [], (method, path)
        assert "4711" not in reply.text
    for body in [
        {"query": "code", "user_id": "alice"},
        {"query": "code", "user_id": "alice", "filters": {"tenant": "acme"}},
        {"query": "code", "user_id": "alice", "tenant": "acme"},
        {"query": "code", "user_id": "alice", "filters": {"tenant_id": "acme", "scope": "*"}},
    ]:
        assert "4711" not in bolt.post("/search", json=body).text
    for options in ({}, {"tenant": "acme"}):
        body = {"model": gateway.model, "user": "alice", "messages": [{"role": "user", "content": "The code?"}]}
        reply = bolt.post("/v1/chat/completions", json={**body, "max_tokens": 2, "memory": options})
        assert reply.status_code == 400 if options else "4711" not in reply.text
    assert bolt.delete("/memories", params={"user_id": "alice"}).json()["deleted"] == 1
    assert bolt.get(f"/memories/{own}").status_code == 404
    assert acme.get(f"/memories/{secret}").json()["memory"].endswith("4711.")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", f"Basic {'a' * 32}", f"Bearer {'a' * 31}", "Bearer \xff"]
)
def test_without_a_key_nothing_is_said(serve_memory: Serve, header: str | None) -> None:
    gateway = serve_memory(keys=KEYS)
    headers = {} if header is None else {b"Authorization": header.encode("latin-1")}
    body = {"model": gateway.model, "messages": [{"role": "user", "content": "x"}]}
    for method, path, sent in [
        ("POST", "/v1/chat/completions", body),
        ("GET", "/v1/models", None),
        ("GET", "/memories?user_id=a", None),
        ("POST", "/search", {"query": "x", "user_id": "a"}),
    ]:
        reply = httpx.request(method, gateway.url + path, json=sent, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(f"{gateway.url}/health").status_code == 200


def test_two_gateways_over_one_folder_see_each_others_memories(serve_memory: Serve, tmp_path: Path) -> None:
    one, two = serve_memory(tmp_path / "shared"), serve_memory(tmp_path / "shared")
    made = add(one.client(), "Rex is a collie.", user_id="alice")
    body = {"query": "Rex", "user_id": "alice"}
    assert [item["id"] for item in two.client().post("/search", json=body).json()["results"]] == [made]
    assert two.client().delete(f"/memories/{made}").status_code == 200
    assert one.client().post("/search", json=body).json()["results"] == []
    ask = {"model": one.model, "user": "alice", "max_tokens": 2, "messages": [{"role": "user", "content": "Rex?"}]}
    assert one.client().post("/v1/chat/completions", json=ask).json()["memory"]["used"] == []
