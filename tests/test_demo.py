"""The demo, whole, on the first facts of its conversation; and what it draws."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from inferscale.cli import main
from inferscale.demo import QUESTIONS, STEPS, Exchange, Side, Step, save_plot, show_exchange, show_steps, sourced
from inferscale.errors import ConfigError
from inferscale.facts import locomo

SIDE = Side("A rather long answer that goes on and on, " * 3, 1.2, 700, 750, None)
EXCHANGE = Exchange("Which café [red]ordered[/red] cups?", "Lanterna", ("fact " * 30,) * 5, SIDE, SIDE)
TIMES = [Step(5, 240, 0.2, 0.05), Step(50, 1900, 3.0, 0.1)]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> dict[str, Any]:
    """`inferscale demo --json --plot` with four of the 63 facts and short answers."""
    picture = tmp_path_factory.mktemp("demo") / "ttft.png"
    real = locomo.load_locomo
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locomo, "load_locomo", lambda path: [replace(c, facts=c.facts[:4]) for c in real(path)])
        patch.setattr("inferscale.demo.MAX_TOKENS", 4)
        done = CliRunner().invoke(main, ["demo", "--json", "--plot", str(picture)])
    assert done.exit_code == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    value = json.loads(done.stdout)
    assert isinstance(value, dict)
    return value


def test_both_modes_answer_from_the_same_tokens(result: dict[str, Any]) -> None:
    assert result["facts"] == 4
    assert len(result["exchanges"]) == len(QUESTIONS)
    for exchange in result["exchanges"]:
        text, inject = exchange["text"], exchange["inject"]
        assert text["prompt_tokens"] == inject["prompt_tokens"]
        assert (text["injected_tokens"], inject["fallback"]) == (0, None)
        assert 0 < inject["injected_tokens"] < inject["prompt_tokens"]
        assert len(exchange["facts"]) == 4


def test_every_step_is_timed_in_both_modes(result: dict[str, Any]) -> None:
    assert [step["k"] for step in result["steps"]] == list(STEPS)
    assert all(step["text"] > 0 and step["ratio"] == step["text"] / step["inject"] for step in result["steps"])


def test_every_fact_of_the_conversation_has_its_turn() -> None:
    (conversation,) = locomo.load_locomo(Path(locomo.__file__).parent.parent / "data" / "demo_conversation.json")
    facts = sourced(conversation)
    assert len(facts) == len(conversation.facts) == 63
    assert all(turn is not None and turn in conversation.turns for turn, _ in facts)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_what_is_drawn_fits_the_terminal_and_shows_brackets_as_text(width: int) -> None:
    out = StringIO()
    console = Console(file=out, width=width, highlight=False)
    show_exchange(console, EXCHANGE)
    show_steps(console, TIMES)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "Which café [red]ordered[/red] cups?" in lines
    bars = [line.count("█") for line in lines if "█" in line]
    assert bars == [2, 1, 32, 1]


def test_a_picture_that_cannot_be_written_is_a_wrong_option(tmp_path: Path) -> None:
    for name in ("no/such/folder.png", "ttft.unheard-of"):
        with pytest.raises(ConfigError, match="cannot be written"):
            save_plot(tmp_path / name, TIMES)
