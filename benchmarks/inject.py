"""What placing a plan's KV costs: bytes, time, and the ratio to a plain memory copy of the same bytes.

    python -m benchmarks.inject [--quick] [--json FILE] [--plot FILE]

Chunks of 25 tokens in SmolLM2's shape are gathered into one cache and their keys rotated. The lower
bound is one copy of the same bytes (every byte is read once and written once), timed in between into
memory that is as warm as the cache's. "fresh" allocates the destination anew in both, as a request
does: the kernel then hands out and clears every page.

`peak_over_kv` is what one whole injected request adds to the process's memory at its peak, over its
plan's KV bytes (k = 50, real model), read from the kernel's high-water mark.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.common import Report, figure, interleave, milliseconds, parser
from benchmarks.workload import SCOPE, conversation, remembered
from inferscale import Engine, Memory, Sampling
from inferscale.compose import place
from inferscale.core import ChunkKV
from inferscale.decoder.forward import KVBuffer
from inferscale.engine.transformers import TransformersEngine

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

CHUNK = 25
TOKENS = (125, 500, 1000, 1500)
MAIN = 1500
TARGETS = {"inject_over_memcpy": (3.0, "at most"), "peak_over_kv": (1.25, "at most")}


class Case:
    """One plan's worth of chunks, a destination, and a plain copy of the same size."""

    def __init__(self, engine: TransformersEngine, tokens: int) -> None:
        spec = engine.spec
        self.decoder, self.tokens = engine.decoder, tokens
        shape = (spec.layers, CHUNK, spec.kv_heads, spec.head_dim)
        self.parts = [
            ChunkKV(
                (0,) * CHUNK, torch.randn(shape).to(engine.decoder.dtype), torch.randn(shape).to(engine.decoder.dtype)
            )
            for _ in range(tokens // CHUNK)
        ]
        self.buffer = KVBuffer.for_decoder(self.decoder, tokens + 160)
        self.bytes = sum(part.nbytes for part in self.parts)
        self.source = torch.ones(self.bytes // 4)
        self.target = torch.ones_like(self.source)

    def place(self) -> None:
        self.buffer.length = 0
        place(self.decoder, self.parts, self.buffer)

    def copy(self) -> None:
        self.target.copy_(self.source)

    def place_fresh(self) -> None:
        place(self.decoder, self.parts, KVBuffer.for_decoder(self.decoder, self.tokens + 160))

    def copy_fresh(self) -> None:
        torch.empty_like(self.source).copy_(self.source)


def measure_places(engine: TransformersEngine, rounds: int, report: Report) -> None:
    cases = {tokens: Case(engine, tokens) for tokens in TOKENS}
    calls: dict[str, Callable[[], float]] = {}
    for tokens, case in cases.items():
        for name in ("place", "copy", "place_fresh", "copy_fresh"):
            calls[f"{tokens}|{name}"] = partial(milliseconds, getattr(case, name))
    samples: dict[str, list[float]] = defaultdict(list)
    for name, ms in interleave(calls, rounds, warmup=3):
        samples[name].append(ms)
    for tokens, case in cases.items():
        for kind in ("", "_fresh"):
            placed, copied = samples[f"{tokens}|place{kind}"], samples[f"{tokens}|copy{kind}"]
            report.rows.append(
                {
                    "tokens": tokens,
                    "memory": "fresh" if kind else "warm",
                    "MB": case.bytes / 1e6,
                    "place_ms": float(np.median(placed)),
                    "memcpy_ms": float(np.median(copied)),
                    "ratio": float(np.median(np.divide(placed, copied))),
                    "GB/s": case.bytes / 1e6 / float(np.median(placed)),
                }
            )
            if tokens == MAIN:
                name = f"inject_over_memcpy{kind}"
                report.figures[name] = figure(np.divide(placed, copied), "x")


def status_bytes(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"the kernel does not report {field}; peak_over_kv needs Linux.")


def peak_of(call: Callable[[], object]) -> int:
    """Bytes that `call` adds to this process's resident memory at its peak."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier requests freed must not hide what this one needs
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the high-water mark
    call()
    return status_bytes("VmHWM") - before


def measure_peak(memory: Memory, question: str, rounds: int, report: Report) -> None:
    def ask() -> None:
        reply = memory.chat(question, user_id=SCOPE.user, top_k=50, sampling=Sampling(max_tokens=32))
        kv.append(reply.injected_tokens * memory.engine.spec.kv_bytes_per_token)

    kv: list[int] = []
    ask()
    peaks = [peak_of(ask) for _ in range(rounds)]
    report.figures["peak_over_kv"] = figure([peak / kv[-1] for peak in peaks], "x")
    report.rows.append(
        {"tokens": kv[-1] // memory.engine.spec.kv_bytes_per_token, "memory": "peak", "MB": kv[-1] / 1e6}
    )


def draw(picture: Picture, report: Report) -> None:
    axes = picture.add_subplot()
    rows = [row for row in report.rows if row["memory"] == "warm"]
    axes.plot([row["tokens"] for row in rows], [row["place_ms"] for row in rows], "o-", label="gather and rotate")
    axes.plot([row["tokens"] for row in rows], [row["memcpy_ms"] for row in rows], "k:", label="memory copy (bound)")
    axes.set(xlabel="tokens injected", ylabel="ms", ylim=(0, None))
    axes.legend()


def main() -> None:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--model", default="smollm2-135m-instruct")
    args = options.parse_args()
    engine = Engine.from_pretrained(args.model)
    assert isinstance(engine, TransformersEngine)
    rounds = 10 if args.quick else 40
    report = Report("inject", {"model": engine.spec.name, "dtype": engine.spec.dtype, "chunk": CHUNK, "rounds": rounds})
    measure_places(engine, rounds, report)
    talk = conversation()
    with tempfile.TemporaryDirectory() as folder, remembered(engine, Path(folder), talk, 100) as memory:
        measure_peak(memory, talk.questions[0].question, 3 if args.quick else 9, report)
    report.finish(args, table=report.rows, plot=lambda picture: draw(picture, report))
    report.judge(TARGETS)


if __name__ == "__main__":
    main()
