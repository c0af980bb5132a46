"""How close injected KV comes to full prefill of exactly the same tokens, by how the KV was made.

    python -m evals.fidelity --data locomo.json [--quick] [--json FILE] [--plot FILE]

Facts are a conversation's observations, retrieved by similarity, the best one last. The default
recipe and the plain header are measured on every question for k = 5, 20 and 50; the other ways on
the first few questions of each conversation at k = 20. Without --data it runs on the packaged demo
conversation. Intervals are bootstrap intervals of the mean over questions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
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
    Way("bare, 5 turns", header=False, window=5),
    Way("header, 5 turns", window=5),
    Way("header, 20 turns", window=20),
    Way("header, 20 turns, streaming", window=20, mode="streaming"),
    *(Way(f"companions {n}", companions=n) for n in (2, 5, 10) if n != SETTINGS.companions),
    Way("companions 5 + 5 turns", companions=5, window=5),
)
MAIN_K, HOT = 20, (2, 5)
TARGETS = {"kl_inject": (0.10, "at most"), "top1_inject": (0.88, "at least"), "kl_hot5": (0.03, "at most")}


class Run:
    """Collects one row a measurement."""

    def __init__(self, report: Report, questions: int, compared: int, sizes: Sequence[int]) -> None:
        self.report, self.questions, self.compared, self.sizes = report, questions, compared, sizes

    def conversation(self, name: str, lab: Lab, chosen: Sequence[LocomoQuestion]) -> None:
        """Measure everything on one conversation."""
        for k in self.sizes:
            asked = [
                lab.question(i, qa, k) for i, qa in enumerate(tqdm(chosen, f"{name} k={k}: references", leave=False))
            ]
            ways = (HEADER, DEFAULT)
            for way in ways:
                lab.encode(way, (fact for question in asked for fact in question.facts))
            for question in tqdm(asked, f"{name} k={k}: scores", leave=False):
                for way in ways:
                    self.score(name, lab, question, way, k, (0, *HOT) if k == MAIN_K or way is DEFAULT else (0,))
            if k == MAIN_K:
                self.nothing(name, lab, asked)
                self.others(name, lab, asked[: self.compared])

    def nothing(self, name: str, lab: Lab, asked: Sequence[Question]) -> None:
        """No memory at all: how far apart the distributions can be."""
        for question in asked:
            score = lab.score(question, [lab.header])
            self.row(name, question, "no memory", MAIN_K, 0, score.kl, score.top1, score.nll)

    def others(self, name: str, lab: Lab, asked: Sequence[Question]) -> None:
        """The ways that are only compared."""
        for way in tqdm(COMPARED, f"{name}: other ways", leave=False):
            lab.encode(way, (fact for question in asked for fact in question.facts))
            for question in asked:
                self.score(name, lab, question, way, MAIN_K, (0,))

    def score(self, name: str, lab: Lab, question: Question, way: Way, k: int, hot: Sequence[int]) -> None:
        chunks = lab.chunks(way, question.facts)
        for j in hot:
            cut = len(question.facts) - j
            score = lab.score(question, chunks[: 1 + cut], question.facts[cut:])
            self.row(name, question, way.name, k, j, score.kl, score.top1, score.nll)

    def row(
        self, name: str, question: Question, way: str, k: int, hot: int, kl: float, top1: float, nll: float
    ) -> None:
        self.report.rows.append(
            {
                "conversation": name,
                "question": question.number,
                "way": way,
                "k": k,
                "hot": hot,
                "memory_tokens": question.memory_tokens,
                "kl": kl,
                "top1": top1,
                "nll": nll,
                "nll_full": question.nll,
            }
        )


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each way, k and hot suffix: means with intervals."""
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["way"], row["k"], row["hot"]), []).append(row)
    table = []
    for (way, k, hot), found in sorted(groups.items(), key=lambda group: (group[0][1], -mean(group[1], "kl"))):
        kl = figure([row["kl"] for row in found], "nats", statistic=np.mean)
        table.append(
            {
                "way": way,
                "k": k,
                "hot": hot,
                "KL": kl.value,
                "low": kl.low,
                "high": kl.high,
                "median": float(np.median([row["kl"] for row in found])),
                "worst": max(row["kl"] for row in found),
                "top-1": mean(found, "top1"),
                "NLL": mean(found, "nll"),
                "NLL full": mean(found, "nll_full"),
                "questions": len(found),
            }
        )
    return table


def mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


def figures(report: Report) -> None:
    """The figures that the targets name: the default recipe at k = 20."""
    for name, key, hot in (("kl_inject", "kl", 0), ("top1_inject", "top1", 0), ("kl_hot5", "kl", 5)):
        values = [row[key] for row in report.rows if (row["way"], row["k"], row["hot"]) == (DEFAULT.name, MAIN_K, hot)]
        report.figures[name] = figure(values, "nats a token" if key == "kl" else "share", statistic=np.mean)


def draw(picture: Picture, report: Report) -> None:
    lines = [line for line in summary(report.rows) if line["k"] == MAIN_K]
    hot = [f" + {line['hot']} hot" if line["hot"] else "" for line in lines]
    names = [f"{line['way']}{suffix} (n={line['questions']})" for line, suffix in zip(lines, hot, strict=True)]
    values = np.array([line["KL"] for line in lines])
    spread = np.array([[line["KL"] - line["low"], line["high"] - line["KL"]] for line in lines]).T
    axes = picture.add_subplot()
    axes.barh(names, values, xerr=spread, color="#4c72b0", ecolor="#333333", capsize=2)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel=f"KL to full prefill, nats a token (k = {MAIN_K}, log scale)")


def load(path: Path | None) -> list[LocomoConversation]:
    return load_locomo(path or Path(str(files("inferscale") / "data" / "demo_conversation.json")))


def main() -> None:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--data", type=Path, metavar="FILE", help="conversations in LoCoMo's shape")
    options.add_argument("--questions", type=int, default=10, help="questions a conversation (default 10)")
    options.add_argument("--compared", type=int, default=2, help="of these, measured in every way (default 2)")
    options.add_argument("--model", default="smollm2-135m-instruct")
    options.add_argument("--seed", type=int, default=0, help="which questions are drawn")
    args = options.parse_args()
    if args.quick:
        args.questions, args.compared = min(args.questions, 2), min(args.compared, 1)
    engine = Engine.from_pretrained(args.model, dtype="float32")
    assert isinstance(engine, TransformersEngine)
    embedder = SentenceTransformerEmbedder(resolve_model("all-minilm-l6-v2").path)
    conversations = load(args.data)
    settings = {"model": engine.spec.name, "dtype": "float32", "questions": args.questions, "seed": args.seed}
    report = Report("fidelity", {**settings, "compared": args.compared, "conversations": len(conversations)})
    run = Run(report, args.questions, args.compared, (5, 20) if args.quick else (5, 20, 50))
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
    for name, (target, word) in TARGETS.items():
        value = report.figures[name].value
        met = value <= target if word == "at most" else value >= target
        print(f"target: {name} {word} {target}: {'met' if met else 'MISSED'} ({value:.4f})")


if __name__ == "__main__":
    main()
