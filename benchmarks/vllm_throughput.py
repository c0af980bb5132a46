"""Requests a second and time to first token against the number of users who ask at once, over HTTP.

    python -m benchmarks.vllm_throughput [--quick] [--json FILE] [--plot FILE] [--data FILE]

`inferscale serve --engine vllm` runs as a process of its own and is asked by an HTTP client. Every user has
50 memories of their own, all of them in every prompt; each answer has at most 8 tokens. Prefix caching is on.
Levels of concurrency and modes come in a new random order each round; a user asks again as soon as they are
answered. `gateway_overhead_ms` is, for one user alone, the client's time to the first piece less the embedding
model and less vLLM's own time to the first token: HTTP, search, plan, its record, threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from benchmarks.common import Report, figure, parser
from benchmarks.ttft import MODES, by_case
from benchmarks.workload import conversation, remembered
from inferscale import Engine

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

MEMORIES = 50
TOKENS = 8
TARGETS = {"throughput_ratio": (3, "at least"), "gateway_overhead_ms": (8, "at most")}


@contextmanager
def gateway(model: str, store: Path) -> Iterator[str]:
    """A gateway with a vLLM of its own; its address."""
    arguments = ("max_model_len=4096", "block_size=32", "enforce_eager=true", "max_num_seqs=64")
    command = [sys.executable, "-m", "inferscale", "serve", "--engine", "vllm", "--port", "0", "--json"]
    command += ["--model", model, "--store", str(store)]
    command += [word for argument in arguments for word in ("--vllm-arg", argument)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={"VLLM_CPU_KVCACHE_SPACE": "4", **os.environ}
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready:
            raise SystemExit("the gateway did not start")
        yield json.loads(ready)["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def ask(client: httpx.AsyncClient, model: str, user: str, question: str, mode: str) -> dict[str, float]:
    """One streamed answer: when its first piece came, when its last, and what the server says of it."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "user": user,
        "memory": {"mode": mode, "top_k": MEMORIES},
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    began = time.perf_counter()
    first = 0.0
    last: dict[str, Any] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                last = json.loads(line[6:])
                if not first and last["choices"][0]["delta"].get("content"):
                    first = time.perf_counter() - began
    if mode == "inject" and (last["memory"]["fallback"] or last["memory"]["text_memories"]):
        raise SystemExit(f"a request was not injected: {last['memory']}")
    spent = last["timings"]
    return {
        "ttft_ms": first * 1e3,
        "overhead_ms": (first - spent["embed"] - spent["prefill"]) * 1e3,
    }


async def burst(
    client: httpx.AsyncClient, model: str, users: list[str], questions: list[str], mode: str, each: int
) -> dict[str, Any]:
    """All `users` ask `each` questions, one after another."""

    async def one(user: str) -> list[dict[str, float]]:
        choose = random.Random(f"{user}{mode}{time.time()}")
        return [await ask(client, model, user, choose.choice(questions), mode) for _ in range(each)]

    began = time.perf_counter()
    rows = [row for rows in await asyncio.gather(*map(one, users)) for row in rows]
    spent = time.perf_counter() - began
    ttft = [row["ttft_ms"] for row in rows]
    return {
        "users": len(users),
        "mode": mode,
        "requests_per_s": len(rows) / spent,
        "ttft_p50_ms": float(np.median(ttft)),
        "ttft_p95_ms": float(np.quantile(ttft, 0.95)),
        "overhead_ms": float(np.median([row["overhead_ms"] for row in rows])),
    }


async def measure(
    url: str, model: str, users: list[str], questions: list[str], levels: list[int], rounds: int, report: Report
) -> None:
    limits = httpx.Limits(max_connections=len(users))
    shuffle = random.Random(0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        for user in users:  # warm: the header is computed, every chunk was read once
            await ask(client, model, user, questions[0], "inject")
        for number in range(rounds):
            cases = [(level, mode) for level in levels for mode in MODES]
            shuffle.shuffle(cases)
            for level, mode in cases:
                each = 5 if level == 1 else 2
                row = await burst(client, model, shuffle.sample(users, level), questions, mode, each)
                report.rows.append({"round": number, **row})


def figures(report: Report, levels: list[int]) -> None:
    rate, overhead = by_case(report, "requests_per_s", "users"), by_case(report, "overhead_ms", "users")
    best = {mode: max(levels, key=lambda level: float(np.median(rate[mode, level]))) for mode in MODES}
    ratio = np.divide(rate["inject", best["inject"]], rate["text", best["text"]])
    report.figures["throughput_ratio"] = figure(ratio, "x")
    report.figures["gateway_overhead_ms"] = figure(overhead["inject", 1], "ms")
    ttft = by_case(report, "ttft_p50_ms", "users")
    for level in levels:
        report.figures[f"ttft_ratio_{level}_users"] = figure(np.divide(ttft["text", level], ttft["inject", level]), "x")


def table(report: Report, levels: list[int]) -> list[dict[str, object]]:
    columns = {
        key: by_case(report, key, "users") for key in ("requests_per_s", "ttft_p50_ms", "ttft_p95_ms", "overhead_ms")
    }
    return [
        {"users": level, "mode": mode, **{key: float(np.median(found[mode, level])) for key, found in columns.items()}}
        for level in levels
        for mode in MODES
    ]


def draw(picture: Picture, report: Report, levels: list[int]) -> None:
    left, right = picture.subplots(1, 2)
    for axes, key, label in (
        (left, "requests_per_s", "requests a second"),
        (right, "ttft_p50_ms", "median time to first token, ms (log)"),
    ):
        found = by_case(report, key, "users")
        for mode in MODES:
            name = {"text": "prefilled as text", "inject": "injected as KV"}[mode]
            axes.plot(levels, [float(np.median(found[mode, level])) for level in levels], marker="o", label=name)
        axes.set(xlabel="users at once", ylabel=label, xticks=levels)
        axes.grid(alpha=0.3)
    right.set_yscale("log")
    left.legend()


def main() -> None:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--data", type=Path, metavar="FILE", help="a conversation in LoCoMo's shape")
    options.add_argument("--model", default="smollm2-135m-instruct")
    options.add_argument("--users", type=int, default=16, help="users with memories of their own")
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    count, rounds = (4, 1) if args.quick else (args.users, args.rounds)
    levels = [level for level in (1, 4, 16, 64) if level <= count]
    talk = conversation(args.data)
    users = [f"user{i}" for i in range(count)]
    settings = {"model": args.model, "users": count, "memories": MEMORIES, "tokens": TOKENS, "rounds": rounds}
    report = Report("vllm_throughput", settings)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.from_pretrained(args.model)
        remembered(engine, Path(folder), talk, MEMORIES, users).close()
        engine.close()
        questions = [qa.question for qa in talk.questions]
        with gateway(args.model, Path(folder)) as url:
            asyncio.run(measure(url, engine.spec.name, users, questions, levels, rounds, report))
    figures(report, levels)
    report.finish(args, table=table(report, levels), plot=lambda picture: draw(picture, report, levels))
    report.judge(TARGETS)


if __name__ == "__main__":
    main()
