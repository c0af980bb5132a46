"""What the memory commands share: their options, and the memory they open."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inferscale.cli.guard import print_json, wants_json

if TYPE_CHECKING:
    from inferscale.config import Sampling, VllmConfig
    from inferscale.core import Scope
    from inferscale.engine.base import Engine
    from inferscale.memory import Memory
    from inferscale.upkeep import Progress

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_USER = "me"

Command = Callable[..., Any]

# Control characters and overrides of writing direction: a memory must not be able to drive the terminal.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """`text` safe to print on a terminal; line ends and tabs stay."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@dataclass(frozen=True, slots=True)
class Output:
    """Where words go: results to stdout, everything else to stderr and not with --quiet."""

    json: bool
    quiet: bool

    @property
    def lively(self) -> bool:
        """True if somebody watches: bars and spinners may be drawn on stderr."""
        return sys.stderr.isatty() and not self.quiet and not self.json

    def result(self, value: Mapping[str, Any]) -> None:
        """The one JSON object of this command, if it was asked for."""
        if self.json:
            print_json(value)

    def line(self, text: str) -> None:
        """A line of the human result."""
        if not self.json:
            click.echo(text)

    def note(self, text: str) -> None:
        """A remark beside the result."""
        if not self.quiet:
            click.secho(text, dim=True, err=True)

    def busy(self, doing: str) -> AbstractContextManager[Any]:
        """A spinner while something takes seconds."""
        if not self.lively:
            return nullcontext()
        from rich.console import Console

        return Console(stderr=True).status(f"[dim]{doing}[/dim]")

    def wait(self, memory: Memory) -> Progress:
        """Wait until every memory's KV is made; shows facts, facts per second and the time left."""
        from tqdm import tqdm

        bar: Any = tqdm(desc="encoding", unit=" facts", leave=False, delay=0.2, disable=not self.lively)

        def follow(progress: Progress) -> None:
            bar.total = progress.encoded + progress.waiting
            bar.update(progress.encoded - bar.n)

        with bar:
            return memory.flush(on_progress=follow)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model that --model, --dtype and --device name."""

    name: str
    dtype: str | None
    device: str | None

    def load(self, output: Output, engine: str = "transformers", vllm: VllmConfig | None = None) -> Engine:
        """The engine, as `Engine.from_pretrained`.

        A model that may have to be downloaded shows the download's bars in the spinner's place.
        """
        calm_libraries(output)
        remote = "/" in self.name and not os.path.exists(os.path.expanduser(self.name))
        with nullcontext() if remote else output.busy(f"loading {self.name}"):
            from inferscale.engine.base import Engine

            return Engine.from_pretrained(self.name, engine=engine, dtype=self.dtype, device=self.device, vllm=vllm)


def calm_libraries(output: Output) -> None:
    """Keep the libraries' bars off stderr: all of them unless somebody watches, else all but downloads."""
    if "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ:
        return
    hub: Any = importlib.import_module("huggingface_hub.utils")
    hub.disable_progress_bars()
    import inferscale.engine.transformers  # noqa: F401 - transformers asks once, at its import, about "Loading weights"

    if output.lively:
        hub.enable_progress_bars()


@dataclass(frozen=True, slots=True)
class Session:
    """One command's model, store, owner and output."""

    model: ModelChoice
    store: Path | None
    owners: dict[str, Any]
    out: Output

    @property
    def whose(self) -> str:
        """The owner in words: "user me"."""
        return ", ".join(f"{key.removesuffix('_id')} {shown(value)}" for key, value in self.owners.items())

    @property
    def scope(self) -> Scope:
        """The owner as a scope."""
        from inferscale.core import Scope

        return Scope(**{key.removesuffix("_id"): value for key, value in self.owners.items()})

    @contextmanager
    def memory(self, *, reencode: bool = False) -> Iterator[Memory]:
        """The memory, closed at the end; what was being encoded then is found again next time."""
        _ = self.scope  # a bad owner is refused before seconds of loading
        engine = self.model.load(self.out)
        from inferscale.memory import Memory

        with self.out.busy("opening the store"):
            memory = Memory(engine, self.store, reencode=reencode)
        try:
            yield memory
        finally:
            memory.close()
            engine.close()


def sampling(max_tokens: int) -> Sampling:
    """Greedy, at most `max_tokens`."""
    from inferscale.config import Sampling

    return Sampling(max_tokens=max_tokens)


def output_options(command: Command) -> Command:
    """--json and --quiet; the command gets an `Output` as `out`."""

    @click.option("--json", is_flag=True, callback=wants_json, help="Print one JSON object on stdout and nothing else.")
    @click.option("-q", "--quiet", is_flag=True, help="No remarks and no progress on stderr; errors stay.")
    @functools.wraps(command)
    def wrapped(json: bool, quiet: bool, **rest: Any) -> Any:
        return command(out=Output(json, quiet), **rest)

    return wrapped


def model_options(command: Command) -> Command:
    """--model, --dtype and --device; the command gets a `ModelChoice` as `model`."""

    @click.option(
        "--model",
        metavar="NAME_OR_PATH",
        default=DEFAULT_MODEL,
        envvar="INFERSCALE_MODEL",
        show_default=True,
        show_envvar=True,
        help="A packaged model, a model folder, or a hub id.",
    )
    @click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Default: float32 on a CPU.")
    @click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. Default: a GPU if there is one.")
    @functools.wraps(command)
    def wrapped(model: str, dtype: str | None, device: str | None, **rest: Any) -> Any:
        return command(model=ModelChoice(model, dtype, device), **rest)

    return wrapped


def store_option(command: Command) -> Command:
    """--store."""
    return click.option(
        "--store",
        type=click.Path(path_type=Path),
        envvar="INFERSCALE_STORE",
        show_envvar=True,
        help="Folder of the memories. Default: $INFERSCALE_HOME/memory.",
    )(command)


def memory_options(command: Command) -> Command:
    """All of the above and the owner; the command gets a `Session` as `session`."""

    @click.option("--user", metavar="ID", envvar="INFERSCALE_USER", help=f"Whose memories. Default: {DEFAULT_USER}.")
    @click.option("--agent", metavar="ID", help="The agent that they belong to.")
    @click.option("--run", metavar="ID", help="The run (one session) that they belong to.")
    @store_option
    @model_options
    @output_options
    @functools.wraps(command)
    def wrapped(
        model: ModelChoice,
        store: Path | None,
        user: str | None,
        agent: str | None,
        run: str | None,
        out: Output,
        **rest: Any,
    ) -> Any:
        given = {"user_id": user, "agent_id": agent, "run_id": run}
        owners = {key: value for key, value in given.items() if value is not None} or {"user_id": DEFAULT_USER}
        return command(session=Session(model, store, owners, out), **rest)

    return wrapped
