"""`inferscale serve` as a process: told to stop in mid-stream, killed in mid-write, with a vLLM that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferscale import Memory
from inferscale.engine.base import Engine
from inferscale.engine.vllm.compat import vllm_version
from inferscale.index.embed import SentenceTransformerEmbedder
from tests.serve.conftest import until

MODEL = "smollm2-135m-instruct"
LONG: dict[str, Any] = {"model": MODEL, "temperature": 0, "stream": True, "max_tokens": 200}
LONG["messages"] = [{"role": "user", "content": "Tell me a long story about a dog."}]


@contextmanager
def serving(store: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address; killed at the end if it still runs."""
    command = [sys.executable, "-m", "inferscale", "serve", "--port", "0", "--store", str(store), "--json", *options]
    with (store.parent / "serve.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
        )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready, (store.parent / "serve.log").read_text()
        yield process, json.loads(ready)["url"]
    finally:
        process.kill()
        process.communicate()


def chunks(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def test_a_stop_in_mid_stream_finishes_the_stream(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "store") as (process, url),
        httpx.stream("POST", f"{url}/v1/chat/completions", json=LONG, timeout=120) as reply,
    ):
        stream = chunks(reply)
        next(stream)
        process.send_signal(signal.SIGTERM)
        last = list(stream)[-1]
        assert last["choices"][0]["finish_reason"] in ("stop", "length")
        assert process.wait(30) == 0


def test_a_kill_in_mid_write_loses_nothing_that_was_acknowledged(
    tmp_path: Path, real_engine: Engine, embedder: SentenceTransformerEmbedder
) -> None:
    acknowledged: list[str] = []
    with serving(tmp_path / "store") as (process, url), httpx.Client(base_url=url, timeout=30) as client:

        def write(worker: int) -> None:
            for i in range(1000):
                body = {"messages": f"Number {worker}-{i}.", "user_id": f"u{worker}"}
                try:
                    reply = client.post("/memories", json=body)
                except httpx.TransportError:
                    return
                acknowledged.append(reply.json()["results"][0]["id"])

        with ThreadPoolExecutor(4) as pool:
            for worker in range(4):
                pool.submit(write, worker)
            enough = until(lambda: len(acknowledged) >= 40, 60)
            process.kill()
    assert enough
    with Memory(real_engine, tmp_path / "store", embedder=embedder) as memory:
        assert all(memory.get(fact) is not None for fact in acknowledged)


@pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed")
def test_vllm_killed_in_mid_stream_is_said_at_once_and_comes_back(tmp_path: Path) -> None:
    arguments = ("max_model_len=2048", "block_size=32", "enforce_eager=true", "max_num_seqs=8")
    options = [word for argument in arguments for word in ("--vllm-arg", argument)]
    with (
        serving(tmp_path / "store", "--engine", "vllm", *options) as (process, url),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        client.post("/memories", json={"messages": "Rex is a collie.", "user_id": "alice"})
        body = {"model": MODEL, "user": "alice", "temperature": 0, "max_tokens": 12}
        body["messages"] = [{"role": "user", "content": "Which breed is Rex?"}]
        before = _answered(client, body)
        assert before["memory"]["fallback"] is None
        assert "collie" in before["choices"][0]["message"]["content"]
        with client.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 1000}) as reply:
            stream = chunks(reply)
            next(stream), next(stream)
            killed = time.monotonic()
            for child in _children(process.pid):
                os.killpg(child, signal.SIGKILL)
            last = list(stream)[-1]
        assert last["error"]["code"] == "engine_unavailable"
        assert time.monotonic() - killed < 2
        down = client.post("/v1/chat/completions", json=body)
        assert (down.status_code, down.json()["error"]["code"]) == (503, "engine_unavailable")
        assert client.get("/health").status_code == 503
        assert client.get("/memories", params={"user_id": "alice"}).json()["results"]
        assert until(lambda: client.get("/health").status_code == 200, 200)
        assert _answered(client, body)["choices"] == before["choices"]
        children = _children(process.pid)
        assert children
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not any(Path(f"/proc/{child}").exists() for child in children)


def _answered(client: httpx.Client, body: dict[str, Any]) -> Any:
    """An answer in which the memory is injected: its KV is made within seconds."""
    for _ in range(40):
        reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        if reply.json()["memory"]["injected_tokens"] and not reply.json()["memory"]["text_memories"]:
            break
        time.sleep(0.25)
    return reply.json()


def _children(pid: int) -> list[int]:
    """The processes that any of its threads started: vLLM is started again by another than the first."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
