"""Time to first token inside vLLM against the number of memories: KV injected, or the same tokens prefilled.

    python -m benchmarks.vllm_ttft [--quick] [--json FILE] [--plot FILE] [--data FILE] [--device-bytes N]

vLLM in this process's children, prefix caching on for both modes, one request at a time, every (k, mode)
in a new random order each round. `ttft_ms` is the time from handing the prompt to vLLM to the first token,
`query_ms` that and the embedding, the search, the plan and its record before it. `load_ms` is what vLLM's
worker spent on fetching, rotating and writing KV, `memcpy_ms` one copy of the same bytes: the lower bound.
`--device-bytes 0` turns the worker's tier of hot chunks off: every chunk is read from its file each time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Report, figure, interleave, milliseconds, parser
from benchmarks.ttft import MODES, SIZES, asker, by_case, draw
from benchmarks.workload import conversation, remembered
from inferscale import Engine, Memory, Reply

TARGETS = {
    "vllm_ttft_ratio_k50": (8, "at least"),
    "vllm_ttft_flatness": (1.5, "at most"),
    "vllm_inject_over_memcpy": (2, "at most"),
}


def counter(name: str) -> float:
    """A counter of the connector's, as vLLM exports it."""
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == f"vllm:inferscale_{name}_total"
    )


def settled(name: str, before: float) -> float:
    """How much a counter has grown; vLLM reports a step's counts shortly after its tokens."""
    deadline = time.monotonic() + 2
    while counter(name) == before and time.monotonic() < deadline:
        time.sleep(0.005)
    return counter(name) - before


def measured(ask: Callable[[], Reply], mode: str) -> dict[str, Any]:
    """One request and what its injection cost."""
    seconds, moved = counter("seconds"), counter("bytes")
    reply = ask()
    row: dict[str, Any] = {"load_ms": 0.0, "memcpy_ms": 0.0}
    if mode == "inject":
        if reply.fallback or reply.text_memories:
            raise SystemExit(f"a request was not injected: {reply.fallback}, {reply.text_memories} memories as text")
        size = int(settled("bytes", moved))
        source = torch.ones(size, dtype=torch.uint8)
        target = torch.ones_like(source)  # its pages are there, as those of vLLM's cache are
        row = {
            "load_ms": (counter("seconds") - seconds) * 1e3,
            "memcpy_ms": float(np.median([milliseconds(lambda: target.copy_(source)) for _ in range(3)])),
        }
    spent = reply.timings
    return {
        "prompt_tokens": reply.prompt_tokens,
        "injected_tokens": reply.injected_tokens,
        "ttft_ms": spent["prefill"] * 1e3,
        "query_ms": spent["first_token"] * 1e3,
        "overhead_ms": (spent["first_token"] - spent["embed"] - spent["prefill"]) * 1e3,
        **row,
    }


def measure(memory: Memory, questions: list[str], rounds: int, report: Report) -> None:
    cases = {f"{mode}|{k}": partial(measured, asker(memory, questions, mode, k), mode) for k in SIZES for mode in MODES}
    for name, row in interleave(cases, rounds, warmup=2):
        mode, _, k = name.partition("|")
        report.rows.append({"k": int(k), "mode": mode, **row})


def figures(report: Report) -> None:
    ttft, query, load, copy = (by_case(report, key) for key in ("ttft_ms", "query_ms", "load_ms", "memcpy_ms"))
    for k in SIZES:
        report.figures[f"vllm_ttft_ratio_k{k}"] = figure(np.divide(ttft["text", k], ttft["inject", k]), "x")
    report.figures["vllm_query_ratio_k50"] = figure(np.divide(query["text", 50], query["inject", 50]), "x")
    report.figures["vllm_ttft_flatness"] = figure(np.divide(ttft["inject", 50], ttft["inject", 5]), "x")
    report.figures["vllm_text_growth"] = figure(np.divide(ttft["text", 50], ttft["text", 5]), "x")
    report.figures["vllm_inject_over_memcpy"] = figure(np.divide(load["inject", 50], copy["inject", 50]), "x")


def table(report: Report) -> list[dict[str, object]]:
    columns = {
        key: by_case(report, key)
        for key in ("prompt_tokens", "ttft_ms", "query_ms", "overhead_ms", "load_ms", "memcpy_ms")
    }
    lines: list[dict[str, object]] = []
    for k in SIZES:
        for mode in MODES:
            spread = figure(columns["ttft_ms"][mode, k], "ms", interval="percentile", level=0.8)
            line: dict[str, object] = {"k": k, "mode": mode}
            line |= {key: float(np.median(values[mode, k])) for key, values in columns.items()}
            lines.append({**line, "ttft p10": spread.low, "ttft p90": spread.high})
    return lines


def main() -> None:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--data", type=Path, metavar="FILE", help="a conversation in LoCoMo's shape")
    options.add_argument("--model", default="smollm2-135m-instruct")
    options.add_argument("--device-bytes", type=int, metavar="N", help="budget of the worker's hot chunks")
    args = options.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    rounds = 3 if args.quick else 15
    talk = conversation(args.data)
    connector = {} if args.device_bytes is None else {"device_bytes": args.device_bytes}
    with tempfile.TemporaryDirectory() as folder:
        vllm = {
            "store": folder,
            "args": {"max_model_len": 4096, "block_size": 32, "enforce_eager": True, "disable_log_stats": False},
            "connector": connector,
        }
        engine = Engine.from_pretrained(args.model, engine="vllm", vllm=vllm)
        report = Report(
            "vllm_ttft",
            {"model": engine.spec.name, "dtype": engine.spec.dtype, "rounds": rounds, "facts": 100, **connector},
        )
        with remembered(engine, Path(folder), talk, 100) as memory:
            measure(memory, [qa.question for qa in talk.questions], rounds, report)
        engine.close()
    figures(report)
    report.finish(args, table=table(report), plot=lambda picture: draw(picture, report))
    report.judge(TARGETS)


if __name__ == "__main__":
    main()
