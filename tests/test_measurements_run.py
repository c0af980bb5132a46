"""Every benchmark and evaluation runs and writes the one form. Long: `make test-slow`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FIGURES = {
    "benchmarks.retrieve": {"search_10k_ms"},
    "benchmarks.ttft": {"ttft_ratio_k50", "ttft_flatness", "overhead_ms"},
    "benchmarks.inject": {"inject_over_memcpy", "peak_over_kv"},
    "benchmarks.encode": {"encode_streaming_over_exact_w50"},
    "benchmarks.vllm_ttft": {"vllm_ttft_ratio_k50", "vllm_ttft_flatness", "vllm_inject_over_memcpy"},
    "benchmarks.vllm_throughput": {"throughput_ratio", "gateway_overhead_ms"},
    "evals.fidelity": {"kl_inject", "top1_inject", "kl_hot5"},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", sorted(FIGURES))
def test_a_quick_run_writes_its_figures_and_a_picture(module: str, tmp_path: Path) -> None:
    result, picture = tmp_path / "result.json", tmp_path / "picture.png"
    command = [sys.executable, "-m", module, "--quick", "--json", str(result), "--plot", str(picture)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    form = json.loads(result.read_text(encoding="utf-8"))
    assert {"name", "commit", "machine", "settings", "rows", "figures"} == set(form)
    assert FIGURES[module] <= set(form["figures"])
    assert form["rows"]
    assert picture.read_bytes().startswith(b"\x89PNG")
