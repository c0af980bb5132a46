"""How close injected KV comes to full prefill of exactly the same tokens, by how the KV was made.

    python -m evals.fidelity --data locomo.json [--quick] [--json FILE] [--plot FILE]

Facts are a conversation's observations, retrieved by similarity, the best one last. The default
recipe and the plain header are measured on every question for k = 5, 20 and 50; the other ways on
the first few questions of each conversation at k = 20, and `ratio` compares each with the default
recipe on exactly those. Without --data it runs on the packaged demo conversation. Intervals are
bootstrap intervals of the mean over questions. A run that is given the --json file of an earlier one
goes on where that stopped, and adds questions or ways that it did not have.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.common import Report, figure, parser
from evals.fidelity.lab import Lab, Question, Way
from inferscale.config import EncodeConfig
from inferscale.engine import Engine
from inferscale.engine.transformers import TransformersEngine
from inferscale.facts.locomo import LocomoConversation, LocomoQuestion, load_locomo
from inferscale.index.embed import SentenceTransformerEmbedder
from inferscale.models import resolve_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

SETTINGS = EncodeConfig()
DEFAULT = Way(f"companions {SETTINGS.companions}", companions=SETTINGS.companions, window=SETTINGS.window)
HEADER = Way("header")
COMPARED = (
    Way("bare", header=False),
    Way("header, 5 turns", window=5),
    Way("header, 20 turns", window=20),
    Way("header, 20 turns, streaming", window=20, mode="streaming"),
    *(Way(f"companions {n}", companions=n) for n in (2, 5, 10) if n != SETTINGS.companions),
    Way("companions 5, closest last", companions=5, closest="last"),
    Way("companions 5 + 5 turns", companions=5, window=5),
)
MAIN_K, HOT = 20, (2, 5)
NOTHING = "no memory"
KEY = ("conversation", "question", "way", "k", "hot")
TARGETS = {"kl_inject": (0.10, "at most"), "top1_inject": (0.88, "at least"), "kl_hot5": (0.03, "at most")}


class Run:
    """Collects one row a measurement; what is there already is not measured again."""

    def __init__(self, report: Report, compared: int, everywhere: Sequence[str], sizes: Sequence[int]) -> None:
        self.report, self.compared, self.everywhere, self.sizes = report, compared, everywhere, sizes
        self.done = {tuple(row[key] for key in KEY) for row in report.rows}

    def conversation(self, name: str, lab: Lab, chosen: Sequence[LocomoQuestion]) -> None:
        """Measure everything on one conversation."""
        for k in self.sizes:
            wanted = [list(self.wanted(name, number, k)) for number in range(len(chosen))]
            asked = {
                number: lab.question(number, qa, k)
                for number, qa in enumerate(tqdm(chosen, f"{name} k={k}: references", leave=False))
                if wanted[number]
            }
            for way in tqdm((None, HEADER, DEFAULT, *COMPARED), f"{name} k={k}: ways", leave=False):
                for number, question in asked.items():
                    for hot in [hot for found, hot in wanted[number] if found == way]:
                        self.score(name, lab, question, way, k, hot)

    def wanted(self, name: str, number: int, k: int) -> Iterator[tuple[Way | None, int]]:
        """Ways (None: no memory) and hot suffixes that are still to be measured on a question."""
        ways = [(way, hot) for way in (HEADER, DEFAULT) for hot in ((0, *HOT) if k == MAIN_K else (0,))]
        if k == MAIN_K:
            ways.append((None, 0))
            ways += [(way, 0) for way in COMPARED if number < self.compared]
            ways += [(way, hot) for way in COMPARED if way.name in self.everywhere for hot in (0, *HOT)]
        for way, hot in dict.fromkeys(ways):
            if (name, number, way.name if way else NOTHING, k, hot) not in self.done:
                yield way, hot

    def score(self, name: str, lab: Lab, question: Question, way: Way | None, k: int, hot: int) -> None:
        cut = len(question.facts) - hot
        chunks = [lab.header]
        if way is not None:
            lab.encode(way, question.facts[:cut])
            chunks = lab.chunks(way, question.facts[:cut])
        score = lab.score(question, chunks, question.facts[cut:] if way is not None else ())
        row = {"conversation": name, "question": question.number, "way": way.name if way else NOTHING, "k": k}
        measured = {"kl": score.kl, "top1": score.top1, "nll": score.nll, "nll_full": question.nll}
        self.report.rows.append({**row, "hot": hot, "memory_tokens": question.memory_tokens, **measured})


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each way, k and hot suffix; `ratio` is its KL over the default recipe's on the same questions."""
    groups: dict[tuple[str, int, int], dict[tuple[str, int], dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["way"], row["k"], row["hot"]), {})[row["conversation"], row["question"]] = row
    table = []
    for (way, k, hot), found in sorted(groups.items(), key=lambda group: (group[0][1], -mean(group[1].values(), "kl"))):
        kl = figure([row["kl"] for row in found.values()], "nats", statistic=np.mean)
        default = groups.get((DEFAULT.name, k, 0), {})
        shared = [default[asked] for asked in found if asked in default]
        table.append(
            {
                "way": way,
                "k": k,
                "hot": hot,
                "KL": kl.value,
                "low": kl.low,
                "high": kl.high,
                "median": float(np.median([row["kl"] for row in found.values()])),
                "worst": max(row["kl"] for row in found.values()),
                "ratio": kl.value / mean(shared, "kl") if len(shared) == len(found) else float("nan"),
                "top-1": mean(found.values(), "top1"),
                "NLL": mean(found.values(), "nll"),
                "full": mean(found.values(), "nll_full"),
                "n": len(found),
            }
        )
    return table


def mean(rows: Iterable[dict[str, Any]], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


def figures(report: Report) -> None:
    """The figures that the targets name: the default recipe at k = 20."""
    for name, key, hot in (("kl_inject", "kl", 0), ("top1_inject", "top1", 0), ("kl_hot5", "kl", 5)):
        values = [row[key] for row in report.rows if (row["way"], row["k"], row["hot"]) == (DEFAULT.name, MAIN_K, hot)]
        report.figures[name] = figure(values, "nats a token" if key == "kl" else "share", statistic=np.mean)


def draw(picture: Picture, report: Report) -> None:
    lines = [line for line in summary(report.rows) if line["k"] == MAIN_K]
    hot = [f" + {line['hot']} hot" if line["hot"] else "" for line in lines]
    names = [f"{line['way']}{suffix} (n={line['n']})" for line, suffix in zip(lines, hot, strict=True)]
    values = np.array([line["KL"] for line in lines])
    spread = np.array([[line["KL"] - line["low"], line["high"] - line["KL"]] for line in lines]).T
    axes = picture.add_subplot()
    axes.barh(names, values, xerr=spread, color="#4c72b0", ecolor="#333333", capsize=2)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel=f"KL to full prefill, nats a token (k = {MAIN_K}, log scale)")


def earlier(path: Path | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run with the same settings."""
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if any(found["settings"].get(key) != value for key, value in settings.items()):
        raise SystemExit(f"{path} holds a run with other settings; remove it or write elsewhere.")
    return list(found["rows"])


def load(path: Path | None) -> list[LocomoConversation]:
    return load_locomo(path or Path(str(files("inferscale") / "data" / "demo_conversation.json")))


def main() -> None:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--data", type=Path, metavar="FILE", help="conversations in LoCoMo's shape")
    options.add_argument("--questions", type=int, default=10, help="questions a conversation (default 10)")
    options.add_argument("--compared", type=int, default=4, help="of these, measured in every way (default 4)")
    options.add_argument(
        "--everywhere", action="append", default=[], metavar="WAY", help="a way to measure on all questions"
    )
    options.add_argument("--model", default="smollm2-135m-instruct")
    options.add_argument("--seed", type=int, default=0, help="which questions are drawn")
    args = options.parse_args()
    if args.quick:
        args.questions, args.compared = min(args.questions, 2), min(args.compared, 1)
    engine = Engine.from_pretrained(args.model, dtype="float32")
    assert isinstance(engine, TransformersEngine)
    embedder = SentenceTransformerEmbedder(resolve_model("all-minilm-l6-v2").path)
    conversations = load(args.data)
    settings = {"model": engine.spec.name, "dtype": "float32", "seed": args.seed}
    settings |= {"data": args.data.name if args.data else "demo conversation"}
    report = Report("fidelity", settings, rows=earlier(args.json, settings))
    run = Run(report, args.compared, args.everywhere, (5, 20) if args.quick else (5, 20, 50))
    with torch.inference_mode():
        for conversation in conversations:
            chosen = [qa for qa in conversation.questions if qa.answer and qa.category != 5]
            random.Random(args.seed).shuffle(chosen)
            lab = Lab(engine.decoder, engine.prompt, embedder, conversation)
            run.conversation(conversation.id, lab, chosen[: args.questions])
            figures(report)
            if args.json:  # what is measured so far survives an interruption
                report.write(args.json)
    report.finish(args, table=summary(report.rows), plot=lambda picture: draw(picture, report))
    if args.data:  # the targets are for LoCoMo
        report.judge(TARGETS)


if __name__ == "__main__":
    main()
