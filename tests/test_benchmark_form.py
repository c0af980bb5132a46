"""Benchmarks and evaluations speak one form."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import Report, figure, interleave, parse_args


def test_the_file_has_the_form_and_names_no_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, picture = tmp_path / "r.json", tmp_path / "r.svg"
    args = parse_args("A test.", ["--json", str(target), "--plot", str(picture), "--quick"])
    report = Report("example", {"dim": 3}, rows=[{"ms": 1.5, "case": "é"}])
    report.figures["a_ms"] = figure([1.0, 2.0, 6.0], "ms")
    report.finish(args, table=report.rows, plot=lambda canvas: canvas.add_subplot().plot([1, 2]) and None)
    form = json.loads(target.read_text(encoding="utf-8"))
    assert list(form) == ["name", "commit", "machine", "settings", "rows", "figures"]
    assert form["rows"] == [{"ms": 1.5, "case": "é"}]
    assert list(form["figures"]["a_ms"]) == ["value", "unit", "low", "high", "n"]
    assert socket.gethostname() not in target.read_text(encoding="utf-8")
    assert picture.stat().st_size > 0
    assert "a_ms" in capsys.readouterr().out


def test_intervals_hold_the_value_and_shrink_with_more_samples() -> None:
    samples = np.random.default_rng(0).normal(10, 1, 400)
    few, many = figure(samples[:20].tolist(), "ms"), figure(samples.tolist(), "ms")
    for one in (few, many):
        assert one.low <= one.value <= one.high
    assert many.high - many.low < few.high - few.low
    spread = figure(samples.tolist(), "ms", interval="percentile")
    assert spread.low == pytest.approx(10 - 1.96, abs=0.4)
    assert figure([3.0], "s") == figure([3.0], "s", interval="percentile")
    for bad in ({"samples": []}, {"samples": [1.0], "interval": "guess"}):
        with pytest.raises(ValueError, match=r"sample|interval"):
            figure(unit="ms", **bad)  # type: ignore[arg-type]


def test_interleaved_cases_are_called_equally_often_in_changing_order() -> None:
    calls: list[str] = []
    cases = {name: (lambda name=name: calls.append(name) or name.upper()) for name in "abc"}
    results = list(interleave(cases, 20, warmup=2))
    assert sorted(results) == sorted([("a", "A"), ("b", "B"), ("c", "C")] * 20)
    rounds = [tuple(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(rounds) == 22
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) > 1
