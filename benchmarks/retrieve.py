"""How long a search takes, for one scope of 100 to 50,000 facts and for many small scopes.

    python -m benchmarks.retrieve [--quick] [--json FILE] [--plot FILE]

One thread, dim 384, the best 50. Vectors are drawn around cluster centres, as sentence embeddings lie;
each search has another query. "cold" runs after 64 MB of other memory were written, as a model's forward
pass would do between two searches. The floor is the time to read once what the scan reads (int8 codes, or
float32 vectors where there are none) at the bandwidth that one thread reads memory with in the same run;
"float32 floor" is that of a plain float32 product. The target: 10,000 facts within 1 ms, with exact recall,
which is checked against float64 here.

`search_10k_ms` is the index alone. `retrieve_10k_ms` is everything after the query is embedded: the scope,
the index, the facts' texts from the catalog (SQLite), duplicates and the wall.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import Report, figure, interleave, milliseconds, parse_args
from inferscale.core import Fact, FactId, Scope, ScopeId
from inferscale.index.embed import Embedder
from inferscale.index.exact import SMALL, ExactIndex
from inferscale.index.scan import use_codes
from inferscale.retrieve.ranked import RankedRetriever
from inferscale.store import Catalog

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

Vectors = npt.NDArray[np.float32]

DIM = 384
TOP_K = 50
SIZES = {"100": (100, 1), "1k": (1_000, 1), "10k": (10_000, 1), "50k": (50_000, 1), "10k, 500 scopes": (10_000, 500)}
"""Facts and scopes of each case."""
TARGET_MS = 1.0
TARGETS = {"search_10k_ms": (TARGET_MS, "at most")}


def clustered(rng: np.random.Generator, count: int) -> Vectors:
    """Vectors [count, DIM] around 40 centres; two of one cluster have a cosine of about 0.6."""
    centres = np.random.default_rng(0).standard_normal((40, DIM))
    return (centres[rng.integers(0, 40, count)] + 0.8 * rng.standard_normal((count, DIM))).astype(np.float32)


class Case:
    """One filled index and its queries."""

    def __init__(self, facts: int, scopes: int) -> None:
        rng = np.random.default_rng(facts + scopes)
        self.facts, self.scopes = facts, [ScopeId(f"s{i}") for i in range(scopes)]
        self.rows, self.queries = clustered(rng, facts), clustered(rng, 512)
        self.ids = [FactId(f"{i:06d}") for i in range(facts)]
        self.index = ExactIndex(DIM)
        self.turn = 0
        each = facts // scopes
        for i, scope in enumerate(self.scopes):
            part = slice(i * each, (i + 1) * each)
            self.index.put(scope, self.ids[part], self.rows[part])

    def search(self) -> None:
        self.turn += 1
        self.index.search(self.scopes, self.queries[self.turn % len(self.queries)], TOP_K)

    def scanned_bytes(self) -> int:
        """What one search reads at least."""
        coded = use_codes(self.index.device) and self.facts // len(self.scopes) >= SMALL
        return self.facts * DIM * (1 if coded else 4)

    def recall(self, queries: int) -> float:
        """Share of the true best TOP_K that is found."""
        unit = self.rows.astype(np.float64)
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        found = 0
        for query in self.queries[:queries]:
            true = np.argsort(-(unit @ query.astype(np.float64)))[:TOP_K]
            hits = self.index.search(self.scopes, query, TOP_K)
            found += len({self.ids[i] for i in true} & {fact for fact, _ in hits})
        return found / (queries * min(TOP_K, self.facts))


def retriever(case: Case, folder: Path) -> Callable[[], object]:
    """A whole retrieval over a case's facts, which lie in a real catalog."""
    catalog, owner = Catalog(folder / "catalog.sqlite3", 5.0), Scope(user="bench")
    texts = [f"Fact number {i} says something about something else." for i in range(case.facts)]
    catalog.add_facts([(Fact(i, text, owner), row) for i, text, row in zip(case.ids, texts, case.rows, strict=True)])
    index = ExactIndex(DIM)
    index.put(owner.id, *catalog.embeddings(owner.id))
    ranked = RankedRetriever(index, catalog, UnusedEmbedder())
    queries = iter(np.tile(case.queries, (100, 1)))
    return lambda: ranked.search(next(queries), owner, TOP_K)


class UnusedEmbedder(Embedder):
    """Queries are vectors already."""

    name, dim, fingerprint = "none", DIM, ""

    def embed(self, texts: Sequence[str]) -> Vectors:
        raise AssertionError("nothing is embedded here")


def measure_retrieval(case: Case, rounds: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        retrieve = retriever(case, Path(folder))
        return [milliseconds(retrieve) for _ in range(rounds + 20)][20:]


def main() -> None:
    args = parse_args(__doc__.partition("\n")[0])
    torch.set_num_threads(1)
    rounds = 100 if args.quick else 400
    cases = {name: Case(*size) for name, size in SIZES.items()}
    other = np.zeros(8 << 20)  # 64 MB, more than the last-level cache share of most machines

    def timed(case: Case, cold: bool) -> Callable[[], float]:
        def run() -> float:
            for _ in range(3):  # the case before this one left its own vectors in the caches
                case.search()
            if cold:
                other.__iadd__(1)
            return milliseconds(case.search)

        return run

    modes = {f"{name}|{mode}": timed(case, mode == "cold") for name, case in cases.items() for mode in ("warm", "cold")}
    samples: dict[str, list[float]] = defaultdict(list)
    report = Report("retrieve", {"dim": DIM, "top_k": TOP_K, "threads": 1, "rounds": rounds})
    for name, ms in interleave(modes, rounds, warmup=5):
        samples[name].append(ms)
    bandwidths = _bandwidths()
    bandwidth = max(bandwidths)
    for key, values in samples.items():
        name, _, mode = key.partition("|")
        case = cases[name]
        spread = figure(values, "ms", interval="percentile")
        report.rows.append(
            {
                "case": name,
                "cache": mode,
                "median_ms": spread.value,
                "p2.5_ms": spread.low,
                "p97.5_ms": spread.high,
                "floor_ms": case.scanned_bytes() / bandwidth * 1e3,
                "float32_floor_ms": case.facts * DIM * 4 / bandwidth * 1e3,
                "recall": case.recall(5 if args.quick else 20),
            }
        )
    report.rows.sort(key=lambda row: (list(SIZES).index(row["case"]), row["cache"]))
    report.figures["search_10k_ms"] = figure(samples["10k|warm"], "ms")
    report.figures["search_10k_cold_ms"] = figure(samples["10k|cold"], "ms")
    report.figures["retrieve_10k_ms"] = figure(measure_retrieval(cases["10k"], rounds), "ms")
    report.figures["floor_10k_ms"] = figure([cases["10k"].scanned_bytes() / b * 1e3 for b in bandwidths], "ms")
    report.figures["recall_10k"] = figure([cases["10k"].recall(5 if args.quick else 100)], "share")
    report.finish(args, table=report.rows, plot=lambda picture: _draw(picture, report))
    report.judge(TARGETS)


def _bandwidths() -> list[float]:
    """Bytes a second that one thread reads from memory, a few passes over 256 MB."""
    block = torch.ones(64 << 20)
    return [block.nbytes / (milliseconds(block.sum) / 1e3) for _ in range(10)]


def _draw(picture: Picture, report: Report) -> None:
    axes = picture.add_subplot()
    for mode in ("warm", "cold"):
        rows = [r for r in report.rows if r["cache"] == mode]
        spread = np.array([[r["median_ms"] - r["p2.5_ms"], r["p97.5_ms"] - r["median_ms"]] for r in rows]).T
        axes.errorbar([r["case"] for r in rows], [r["median_ms"] for r in rows], spread, fmt="o", label=mode, capsize=3)
    axes.plot([r["case"] for r in rows], [r["floor_ms"] for r in rows], "k:", label="floor: bytes scanned / bandwidth")
    axes.axhline(TARGET_MS, color="grey", linewidth=0.8)
    axes.set(yscale="log", ylabel="ms a search, one thread", xlabel="facts")
    axes.legend()


if __name__ == "__main__":
    main()
