"""The demo: a packaged conversation is encoded, asked about in both modes side by side, and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscale.core import Scope

if TYPE_CHECKING:
    from rich.console import Console

    from inferscale.answer import Reply
    from inferscale.core import Turn
    from inferscale.engine.base import Engine
    from inferscale.facts.locomo import LocomoConversation
    from inferscale.upkeep import Progress

SCOPE = Scope(user="demo")
QUESTIONS = (0, 1, 4, 3, 9)
"""Which of the conversation's twelve questions are asked: five of those that the packaged model of 135M
parameters answers rightly from the memories as text. It fails at half of the twelve even so."""
TOP_K = 20
STEPS = (5, 10, 20, 50)
"""Memories per request in the timed part."""
REPEATS = 3
MAX_TOKENS = 24
SHOWN_FACTS = 3
BAR = 32
"""Characters of the longest bar."""


@dataclass(frozen=True, slots=True)
class Side:
    """One mode's answer."""

    text: str
    ttft: float
    """Seconds from the question to the first token, search included."""
    injected_tokens: int
    prompt_tokens: int
    fallback: str | None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question in both modes, over the same memories (`facts`, best first)."""

    question: str
    expected: str | None
    facts: tuple[str, ...]
    text: Side
    inject: Side


@dataclass(frozen=True, slots=True)
class Step:
    """Median TTFT in seconds with `k` memories in the prompt."""

    k: int
    prompt_tokens: int
    text: float
    inject: float

    @property
    def ratio(self) -> float:
        """How many times sooner the first token comes with injection."""
        return self.text / self.inject


class Demo:
    """One run in the store at `path`; call `encode` first. A context manager."""

    def __init__(self, engine: Engine, path: Path) -> None:
        from inferscale.facts.locomo import load_locomo
        from inferscale.memory import Memory

        with as_file(files("inferscale") / "data" / "demo_conversation.json") as file:
            (self.conversation,) = load_locomo(file)
        self.memory = Memory(engine, path)

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *error: object) -> None:
        self.memory.close()

    def encode(self, wait: Callable[[Any], Progress] | None = None) -> tuple[int, float]:
        """Remember the conversation's facts and make their KV → (facts, seconds).

        `wait` is called with the memory in the place of `Memory.flush`, to draw progress.
        """
        began = time.perf_counter()
        self.memory.add_facts(sourced(self.conversation), SCOPE)
        (wait or type(self.memory).flush)(self.memory)
        return len(self.conversation.facts), time.perf_counter() - began

    def warm_up(self) -> None:
        """One request in each mode that nobody times."""
        for mode in ("text", "inject"):
            self._ask(self.conversation.questions[QUESTIONS[0]].question, mode, STEPS[0], 1)

    def ask(self, questions: Sequence[int] = QUESTIONS) -> Iterator[Exchange]:
        """Each question in both modes, interleaved, the order turning round every time."""
        for number, at in enumerate(questions):
            asked = self.conversation.questions[at]
            order = ("text", "inject") if number % 2 == 0 else ("inject", "text")
            replies = {mode: self._ask(asked.question, mode, TOP_K, MAX_TOKENS) for mode in order}
            facts = tuple(item["memory"] for item in reversed(replies["inject"].memories))
            yield Exchange(asked.question, asked.answer, facts, _side(replies["text"]), _side(replies["inject"]))

    def measure(self, steps: Sequence[int] = STEPS, repeats: int = REPEATS) -> Iterator[Step]:
        """TTFT by number of memories, medians of `repeats` interleaved requests."""
        for k in steps:
            seconds: dict[str, list[float]] = {"text": [], "inject": []}
            tokens = 0
            for number in range(repeats):
                question = self.conversation.questions[QUESTIONS[number % len(QUESTIONS)]].question
                for mode in sorted(seconds, reverse=number % 2 == 0):
                    reply = self._ask(question, mode, k, 1)
                    seconds[mode].append(reply.timings["first_token"])
                    tokens = max(tokens, reply.prompt_tokens)
            yield Step(k, tokens, statistics.median(seconds["text"]), statistics.median(seconds["inject"]))

    def _ask(self, question: str, mode: str, k: int, max_tokens: int) -> Reply:
        from inferscale.config import Sampling

        sampling = Sampling(max_tokens=max_tokens)
        return self.memory.chat(question, user_id=SCOPE.user, mode=mode, top_k=k, sampling=sampling)


def sourced(conversation: LocomoConversation) -> list[tuple[Turn | None, str]]:
    """A LoCoMo conversation's facts, each with the turn it came from, as `Memory.add_facts` takes them."""
    turns = {turn.id: turn for turn in conversation.turns}
    return [(turns.get(fact.turn_id), fact.text) for fact in conversation.facts]


def _side(reply: Reply) -> Side:
    ttft = reply.timings["first_token"]
    return Side(reply.text, ttft, reply.injected_tokens, reply.prompt_tokens, reply.fallback)


def form(encoded: tuple[int, float], exchanges: Sequence[Exchange], steps: Sequence[Step]) -> dict[str, Any]:
    """Everything for JSON; times in seconds."""
    return {
        "facts": encoded[0],
        "encode_seconds": encoded[1],
        "exchanges": [asdict(exchange) for exchange in exchanges],
        "steps": [{**asdict(step), "ratio": step.ratio} for step in steps],
    }


# --- what people see ---


def show_exchange(console: Console, exchange: Exchange) -> None:
    """Question, facts and both answers."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console.print(Text(exchange.question, style="bold"))
    for fact in exchange.facts[:SHOWN_FACTS]:
        console.print(Padding(Text(f"· {fact}", style="dim"), (0, 0, 0, 2)))
    if (more := len(exchange.facts) - SHOWN_FACTS) > 0:
        console.print(Padding(Text(f"· and {more} more memories", style="dim"), (0, 0, 0, 2)))
    table = Table.grid(padding=(0, 2))
    table.add_column(width=8)
    table.add_column(justify="right", width=8)
    table.add_column(overflow="fold")
    for name, side, style in (("text", exchange.text, ""), ("inject", exchange.inject, "green")):
        table.add_row(Text(f"  {name}", style), Text(_ms(side.ttft), style), Text(_line(side.text)))
    console.print(table)
    side = exchange.inject
    how = f"{side.injected_tokens} of {side.prompt_tokens} prompt tokens injected"
    if side.fallback:
        how = f"nothing injected ({side.fallback})"
    console.print(Padding(Text(f"{how}; the right answer: {exchange.expected}", style="dim"), (0, 0, 1, 2)))


def show_steps(console: Console, steps: Sequence[Step]) -> None:
    """The table of times, and the same as bars."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title="Time to first token, by memories in the prompt", title_justify="left", box=None, pad_edge=False
    )
    for name in ("memories", "prompt tokens", "text", "inject", "sooner"):
        table.add_column(name, justify="right")
    for step in steps:
        table.add_row(str(step.k), f"{step.prompt_tokens:,}", _ms(step.text), _ms(step.inject), f"{step.ratio:.1f}x")
    console.print(table)
    console.print()
    longest = max(max(step.text, step.inject) for step in steps)
    for step in steps:
        for mode, seconds, style in (("text", step.text, "yellow"), ("inject", step.inject, "green")):
            bar = "█" * max(1, round(BAR * seconds / longest))
            label = f"{step.k:>4} " if mode == "text" else "     "
            console.print(Text(f"{label}{mode:<7}").append(bar, style=style).append(f" {_ms(seconds)}"))


def save_plot(path: Path, steps: Sequence[Step]) -> None:
    """Draw the times into `path` (.png, .svg, .pdf). Raises ConfigError if that cannot be done."""
    from inferscale.errors import ConfigError

    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; run `pip install matplotlib`.") from None
    picture = Figure(figsize=(7, 4), layout="constrained")
    axes = picture.subplots()
    tokens = [step.prompt_tokens for step in steps]
    for name, marker in (("text", "o"), ("inject", "s")):
        axes.plot(tokens, [getattr(step, name) * 1e3 for step in steps], marker=marker, label=name)
    axes.set(xlabel="prompt tokens", ylabel="time to first token (ms)", ylim=(0, None))
    axes.set_title("Memories as prompt text, and as injected KV")
    axes.legend(frameon=False)
    try:
        picture.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # no such folder, or an ending that matplotlib does not know
        raise ConfigError(f"The picture cannot be written to {path} ({error}).") from error


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _line(text: str) -> str:
    return " ".join(text.split())
