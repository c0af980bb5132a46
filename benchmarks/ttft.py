"""Time to first token against the number of memories: KV injected, or the same tokens prefilled.

    python -m benchmarks.ttft [--quick] [--json FILE] [--plot FILE] [--data FILE]

Embedded engine, real small model, one request at a time, every (k, mode) in a new random order each
round. `ttft_ms` is the engine's time from the request to the first token, `query_ms` that and the
embedding, the search and the plan before it. `overhead_ms` is `query_ms` less the engine and the
embedding model. Ratios are medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.common import Report, figure, interleave, parser
from benchmarks.workload import SCOPE, conversation, remembered
from inferscale import Engine, Memory, Reply, Sampling

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

SIZES = (5, 10, 20, 50)
MODES = ("text", "inject")
TARGETS = {"ttft_ratio_k50": (8, "at least"), "ttft_flatness": (2, "at most"), "overhead_ms": (5, "at most")}


def asker(memory: Memory, questions: list[str], mode: str, k: int) -> Callable[[], Reply]:
    """A call that asks the next question each time; both modes of a k ask the same ones."""
    asked = iter(range(1_000_000))

    def ask() -> Reply:
        question = questions[next(asked) % len(questions)]
        return memory.chat(question, user_id=SCOPE.user, mode=mode, top_k=k, sampling=Sampling(max_tokens=1))

    return ask


def measure(memory: Memory, questions: list[str], rounds: int, report: Report) -> None:
    cases = {f"{mode}|{k}": asker(memory, questions, mode, k) for k in SIZES for mode in MODES}
    for name, reply in interleave(cases, rounds, warmup=1):
        mode, _, k = name.partition("|")
        spent = reply.timings
        engine = spent["compose"] + spent["prefill"]
        if mode == "inject" and (reply.fallback or reply.text_memories):
            raise SystemExit(f"a request was not injected: {reply.fallback}, {reply.text_memories} memories as text")
        report.rows.append(
            {
                "k": int(k),
                "mode": mode,
                "prompt_tokens": reply.prompt_tokens,
                "injected_tokens": reply.injected_tokens,
                "ttft_ms": engine * 1e3,
                "compose_ms": spent["compose"] * 1e3,
                "query_ms": spent["first_token"] * 1e3,
                "overhead_ms": (spent["first_token"] - spent["embed"] - engine) * 1e3,
            }
        )


def by_case(report: Report, key: str, size: str = "k") -> dict[tuple[str, int], list[float]]:
    """One value a round for each (mode, size), in the order of the rounds; `size` names the row's size."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in report.rows:
        found[row["mode"], row[size]].append(row[key])
    return found


def figures(report: Report) -> None:
    ttft, query, overhead = (by_case(report, key) for key in ("ttft_ms", "query_ms", "overhead_ms"))
    for k in SIZES:
        report.figures[f"ttft_ratio_k{k}"] = figure(np.divide(ttft["text", k], ttft["inject", k]), "x")
    report.figures["query_ratio_k50"] = figure(np.divide(query["text", 50], query["inject", 50]), "x")
    report.figures["ttft_flatness"] = figure(np.divide(ttft["inject", 50], ttft["inject", 5]), "x")
    report.figures["text_growth"] = figure(np.divide(ttft["text", 50], ttft["text", 5]), "x")
    report.figures["overhead_ms"] = figure(overhead["inject", 50], "ms")


def table(report: Report) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    columns = {key: by_case(report, key) for key in ("ttft_ms", "query_ms", "compose_ms", "overhead_ms")}
    tokens = by_case(report, "prompt_tokens")
    for k in SIZES:
        for mode in MODES:
            spread = figure(columns["ttft_ms"][mode, k], "ms", interval="percentile", level=0.8)
            line: dict[str, object] = {"k": k, "mode": mode, "prompt tokens": int(np.median(tokens[mode, k]))}
            line |= {key: float(np.median(values[mode, k])) for key, values in columns.items()}
            lines.append({**line, "ttft p10": spread.low, "ttft p90": spread.high})
    return lines


def draw(picture: Picture, report: Report) -> None:
    axes = picture.add_subplot()
    ttft = by_case(report, "ttft_ms")
    for mode in MODES:
        spread = [figure(ttft[mode, k], "ms", interval="percentile", level=0.8) for k in SIZES]
        error = [[s.value - s.low for s in spread], [s.high - s.value for s in spread]]
        label = {"text": "prefilled as text", "inject": "injected as KV"}[mode]
        axes.errorbar(SIZES, [s.value for s in spread], error, marker="o", capsize=3, label=label)
    axes.set(xlabel="memories in the prompt", ylabel="time to first token, ms (log)", yscale="log", xticks=SIZES)
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> None:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--data", type=Path, metavar="FILE", help="a conversation in LoCoMo's shape")
    options.add_argument("--model", default="smollm2-135m-instruct")
    args = options.parse_args()
    rounds = 3 if args.quick else 15
    talk = conversation(args.data)
    engine = Engine.from_pretrained(args.model)
    settings = {"model": engine.spec.name, "dtype": engine.spec.dtype, "rounds": rounds, "facts": len(talk.facts)}
    report = Report("ttft", settings)
    with tempfile.TemporaryDirectory() as folder, remembered(engine, Path(folder), talk, 100) as memory:
        measure(memory, [qa.question for qa in talk.questions], rounds, report)
    figures(report)
    report.finish(args, table=table(report), plot=lambda picture: draw(picture, report))
    report.judge(TARGETS)


if __name__ == "__main__":
    main()
