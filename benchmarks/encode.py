"""What encoding a conversation costs against its context window, by one pass a fact and by streaming.

    python -m benchmarks.encode [--quick] [--json FILE] [--plot FILE] [--data FILE] [--sample N]

A whole conversation's facts behind the header and w turns, without companions. "exact" computes the
window again for every fact, "streaming" every turn once. With --sample N the exact way runs on every
Nth fact (its cost a fact does not depend on the others) and its seconds are scaled up. One run a mode;
the interval resamples the times between facts. "tokens" is what a way computes: the lower bound is
2 FLOPs a token and parameter.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from benchmarks.common import Figure, Report, parser
from benchmarks.workload import conversation
from inferscale import EncodeConfig, Engine
from inferscale.core import render_fact
from inferscale.encode import EncodeJob
from inferscale.encode.base import TokenIds
from inferscale.facts.locomo import LocomoConversation

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

WINDOWS = (0, 5, 20, 50)
MODES = ("exact", "streaming")
TARGETS = {"encode_streaming_over_exact_w50": (0.25, "at most")}


def prepare(engine: Engine, talk: LocomoConversation) -> tuple[list[EncodeJob], list[TokenIds]]:
    """Every fact with the turn it came from, and every turn, as token ids."""
    place = {turn.id: i for i, turn in enumerate(talk.turns)}
    jobs = [
        EncodeJob(
            engine.prompt.fact_ids(render_fact(fact.text, fact.time)), place.get(fact.turn_id) if fact.turn_id else None
        )
        for fact in talk.facts
    ]
    return jobs, [engine.prompt.fact_ids(turn.line) for turn in talk.turns]


def computed_tokens(jobs: list[EncodeJob], turns: list[TokenIds], window: int, mode: str) -> int:
    """Tokens that a way runs through the model (the header aside)."""
    facts = sum(len(job.fact) for job in jobs)
    spans = [range(max(0, job.turn - window), job.turn) for job in jobs if job.turn is not None]
    if mode == "exact":
        return facts + sum(len(turns[t]) for span in spans for t in span)
    return facts + sum(len(turns[t]) for t in {t for span in spans for t in span})


def run(engine: Engine, jobs: list[EncodeJob], turns: list[TokenIds], window: int, mode: str) -> list[float]:
    """Seconds at which each fact was done."""
    encoder = engine.encoder(EncodeConfig(window=window, mode=mode))
    began = time.perf_counter()
    done = (fact for results in encoder.encode(jobs, turns) for fact in results)
    steps = tqdm(done, f"w={window} {mode}", len(jobs), leave=False, unit="fact")
    return [time.perf_counter() - began for _ in steps]


def ratio(exact: list[float], streaming: list[float]) -> Figure:
    """Streaming ÷ exact in seconds a fact; the interval resamples the times between facts."""
    steps = [np.diff([0.0, *times]) for times in (streaming, exact)]
    rng = np.random.default_rng(0)
    draws = [rng.choice(s, (2000, len(s))).mean(axis=1) for s in steps]
    low, high = np.quantile(draws[0] / draws[1], [0.025, 0.975])
    return Figure(float(steps[0].mean() / steps[1].mean()), "x", float(low), float(high), len(exact))


def draw(picture: Picture, report: Report) -> None:
    axes = picture.add_subplot()
    for mode in MODES:
        rows = [row for row in report.rows if row["mode"] == mode]
        axes.plot([row["window"] for row in rows], [row["seconds"] for row in rows], "o-", label=mode)
    axes.set(xlabel="context window, turns", ylabel="seconds a conversation (log)", yscale="log", xticks=WINDOWS)
    axes.legend()


def main() -> None:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--data", type=Path, metavar="FILE", help="conversations in LoCoMo's shape; the first is used")
    options.add_argument("--sample", type=int, default=1, metavar="N", help="exact: every Nth fact (default 1)")
    options.add_argument("--model", default="smollm2-135m-instruct")
    args = options.parse_args()
    engine = Engine.from_pretrained(args.model)
    jobs, turns = prepare(engine, conversation(args.data))
    if args.quick:
        jobs = [job for job in jobs if job.turn is None or job.turn < 60][:40]
    settings = {"model": engine.spec.name, "dtype": engine.spec.dtype, "facts": len(jobs), "turns": len(turns)}
    report = Report("encode", {**settings, "sample": args.sample})
    for window in WINDOWS:
        times = {}
        for mode in MODES:
            step = args.sample if mode == "exact" else 1
            times[mode] = run(engine, jobs[::step], turns, window, mode)
            tokens = computed_tokens(jobs, turns, window, mode)
            seconds = times[mode][-1] * len(jobs) / len(times[mode])
            report.rows.append(
                {
                    "window": window,
                    "mode": mode,
                    "seconds": seconds,
                    "facts/s": len(jobs) / seconds,
                    "tokens": tokens,
                    "tokens/s": tokens / seconds,
                    "measured facts": len(times[mode]),
                }
            )
    report.figures["encode_streaming_over_exact_w50"] = ratio(times["exact"], times["streaming"])
    report.finish(args, table=report.rows, plot=lambda picture: draw(picture, report))
    report.judge(TARGETS)


if __name__ == "__main__":
    main()
