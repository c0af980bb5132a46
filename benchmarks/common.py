"""What every benchmark and evaluation shares: options, intervals, the machine, and one form of result.

    from benchmarks.common import Report, figure, parse_args

    args = parse_args("How long a search takes.")
    report = Report("retrieve", settings={"dim": 384})
    report.rows.append({"facts": 10_000, "ms": 0.5})
    report.figures["search_10k_ms"] = figure([0.5, 0.6, 0.5], "ms")
    report.finish(args, plot=draw)

The JSON file holds `{"name", "commit", "machine", "settings", "rows", "figures"}`, where `figures` is
`{"<name>": {"value", "unit", "low", "high", "n"}}`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every run has; add your own before `parse_args`."""
    options = argparse.ArgumentParser(description=description, allow_abbrev=False)
    options.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    options.add_argument("--plot", type=Path, metavar="FILE", help="draw the result here (.png or .svg)")
    options.add_argument("--quick", action="store_true", help="a smaller run of the same thing")
    return options


def parse_args(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parsed options of a run that has no others."""
    return parser(description).parse_args(argv)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that matters, with the interval of the run."""

    value: float
    unit: str
    low: float
    high: float
    n: int


def figure(
    samples: Sequence[float],
    unit: str,
    *,
    statistic: Callable[..., Any] = np.median,
    interval: str = "bootstrap",
    level: float = 0.95,
) -> Figure:
    """`statistic` of the samples with an interval.

    "bootstrap": where the statistic itself lies (percentile bootstrap, 2,000 resamples, fixed seed).
    "percentile": where the samples lie, the middle `level` of them. `statistic` takes `axis`.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError("a figure needs at least one sample")
    if interval == "bootstrap":
        draws = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
        spread = statistic(values[draws], axis=1)
    elif interval == "percentile":
        spread = values
    else:
        raise ValueError('interval must be "bootstrap" or "percentile"')
    low, high = np.quantile(spread, [(1 - level) / 2, (1 + level) / 2])
    return Figure(float(statistic(values, axis=0)), unit, float(low), float(high), len(values))


def milliseconds(call: Callable[[], object]) -> float:
    """Wall time of one call in ms; work queued on a GPU is waited for on both sides."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def interleave(
    cases: Mapping[str, Callable[[], T]], rounds: int, *, warmup: int = 1, seed: int = 0
) -> Iterator[tuple[str, T]]:
    """Call every case `rounds` times, each round in a new random order, and yield (name, result).

    What drifts during a run (clock speed, neighbours, caches) then falls on all cases alike. `warmup`
    rounds run first and are thrown away.
    """
    order = list(cases)
    shuffle = random.Random(seed)
    for number in range(-warmup, rounds):
        shuffle.shuffle(order)
        for name in order:
            result = cases[name]()
            if number >= 0:
                yield name, result


@dataclass
class Report:
    """A run's result in the one form; `rows` is every measurement, `figures` the few that matter."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)

    def form(self) -> dict[str, Any]:
        """The result as it is written to JSON."""
        return {
            "name": self.name,
            "commit": commit(),
            "machine": machine(),
            "settings": self.settings,
            "rows": self.rows,
            "figures": {
                name: {"value": f.value, "unit": f.unit, "low": f.low, "high": f.high, "n": f.n}
                for name, f in self.figures.items()
            },
        }

    def write(self, path: Path) -> None:
        """Write the result so far; long runs do so now and then, so that an interruption loses little."""
        text = json.dumps(self.form(), indent=1, ensure_ascii=False, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")

    def judge(self, targets: Mapping[str, tuple[float, str]]) -> None:
        """Print of each figure whether it meets its target: (bound, "at least" or "at most")."""
        for name, (bound, word) in targets.items():
            value = self.figures[name].value
            met = value >= bound if word == "at least" else value <= bound
            print(f"target: {name} {word} {bound}: {'met' if met else 'MISSED'} ({value:.3g})")

    def finish(
        self,
        args: argparse.Namespace,
        *,
        table: Sequence[Mapping[str, Any]] | None = None,
        plot: Callable[[Picture], None] | None = None,
    ) -> None:
        """Print `table` (by default nothing) and the figures; write what `--json` and `--plot` ask for."""
        console = Console(width=None if sys.stdout.isatty() else 120)  # a log has no width of its own
        if table:
            console.print(as_table(self.name, table))
        shown = [
            {"figure": name, "value": f.value, "unit": f.unit, "low": f.low, "high": f.high, "n": f.n}
            for name, f in self.figures.items()
        ]
        if shown:
            console.print(as_table(f"{self.name}: figures", shown))
        if args.json:
            self.write(args.json)
        if args.plot:
            if plot is None:
                raise SystemExit(f"{self.name} draws no picture; leave --plot out.")
            save_plot(args.plot, plot)


def as_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows of the same keys as a terminal table; numbers to three significant digits."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title, title_justify="left")
    for name in columns:
        numeric = all(isinstance(row.get(name, 0), (int, float)) for row in rows)
        table.add_column(name, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(name, "")) for name in columns))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def save_plot(path: Path, draw: Callable[[Picture], None]) -> None:
    """Let `draw` fill an empty picture and write it to `path`."""
    try:
        from matplotlib.figure import Figure as Picture
    except ImportError:
        raise SystemExit("--plot needs matplotlib; run `pip install matplotlib`.") from None
    picture = Picture(figsize=(8, 4.5), layout="constrained")
    draw(picture)
    picture.savefig(path, dpi=150)


def commit() -> str:
    """The commit of the working tree, with "+" behind it if tracked files differ; "unknown" outside git."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


def machine() -> dict[str, Any]:
    """The class of machine, without a name: processor, cores, memory, GPU, versions."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "ram_gib": round(_ram_bytes() / 2**30),
        "gpus": gpus,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _ram_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return 0
