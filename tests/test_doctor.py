"""The doctor finds what is broken, and nothing where nothing is."""

from __future__ import annotations

import importlib.metadata as metadata
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from inferscale import Engine, Memory
from inferscale.cli import main
from inferscale.config import EncodeConfig, MemoryConfig
from inferscale.core import ChunkKV
from inferscale.decoder.base import LayerwiseDecoder
from inferscale.decoder.forward import KVBuffer
from inferscale.doctor import Check, examine, injection, installation
from inferscale.doctor.report import guarded

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    engine = Engine.from_pretrained(MODEL)
    yield engine
    engine.close()


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed versions by package, which a test may change; the requirements are those of a real release."""
    versions = {"torch": "2.13.0", "transformers": "5.19.0", "click": "8.1.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    needs = ["torch>=2.6", "transformers>=5.16.1,<5.20", "click>=8.1", 'pytest; extra == "dev"']
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    monkeypatch.setattr(metadata, "version", version)
    return versions


def by_name(checks: Sequence[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_sound_installation_is_healthy_and_injects_exactly(engine: Engine) -> None:
    told: list[Check] = []
    report = examine(engine, on_check=told.append)
    assert report.checks == tuple(told)
    assert report.healthy
    checks = by_name(report.checks)
    for name in ("decoder", "exact"):
        assert checks[name].status == "ok"
        assert checks[name].data["relative"] < 1e-4
        assert checks[name].data["agree"] == checks[name].data["tokens"] == injection.NEXT_TOKENS
    assert checks["composed"].status == "note"
    assert checks["composed"].data["facts"] == len(injection.FACTS)
    json.dumps(report.form(), allow_nan=False)


@pytest.mark.parametrize("fault", ["neighbour", "position"])
def test_wrong_keys_are_a_fault(engine: Engine, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = injection.place

    def wrong(decoder: LayerwiseDecoder, parts: Sequence[ChunkKV], buffer: KVBuffer) -> None:
        *header, fact = parts
        if fault == "neighbour":
            real(decoder, [*header, ChunkKV(fact.token_ids, fact.keys.roll(1, 1), fact.values)], buffer)
        else:  # the fact stands one position too early, behind a header that lost its last token
            (head,) = header
            real(decoder, [ChunkKV(head.token_ids[1:], head.keys[:, 1:], head.values[:, 1:]), fact], buffer)

    monkeypatch.setattr(injection, "place", wrong)
    check = injection.check_exact(engine)  # type: ignore[arg-type]
    assert check.status == "fault"
    assert "do not inject" in check.detail


def test_packages_in_range_are_ok(declared: dict[str, str]) -> None:
    (check,) = installation.check_packages()
    assert (check.status, check.data["versions"]) == ("ok", declared)


def test_a_missing_or_too_new_package_is_a_fault_that_says_what_to_install(declared: dict[str, str]) -> None:
    del declared["click"]
    declared["transformers"] = "5.20.0"
    report = examine(MODEL)
    assert not report.healthy
    faults = [check.detail for check in report.checks if check.status == "fault"]
    assert len(faults) == 2
    assert "pip install 'transformers<5.20,>=5.16.1'" in faults[0]
    assert "click is missing" in faults[1]
    assert by_name(report.checks)["model"].status == "warning"


def test_a_home_that_cannot_be_made_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "file" / "home"))
    assert guarded("home", installation.check_home).status == "fault"
    assert guarded("sqlite", installation.check_sqlite).status == "fault"


def test_a_store_is_counted_and_one_of_another_recipe_is_named(engine: Engine, tmp_path: Path) -> None:
    with Memory(engine, tmp_path / "mine") as memory:
        memory.add("Rex is a collie.", user_id="alice")
        memory.add("Tom lives in Lisbon.", agent_id="bot", user_id="alice")
        memory.flush()
    check = installation.check_store(tmp_path / "mine", engine)
    assert check.status == "ok"
    assert (check.data["facts"], check.data["waiting"], check.data["chunks"]) == (2, 0, 2)
    assert check.data["bytes_per_token"] == pytest.approx(engine.spec.kv_bytes_per_token, rel=0.1)
    other = MemoryConfig(encode=EncodeConfig(companions=0))
    Memory(engine, tmp_path / "other", config=other).close()
    check = installation.check_store(tmp_path / "other", engine)
    assert check.status == "warning"
    assert "encode --reencode" in check.detail


def test_the_command_ends_with_1_for_a_fault_and_speaks_json(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["doctor", "--json", "--model", "no-such/model", "--store", str(tmp_path / "none")])
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["healthy"] is False
    assert [check["name"] for check in report["checks"] if check["status"] == "fault"] == ["model", "store"]
    assert not (tmp_path / "none").exists()


def test_the_command_says_in_words_that_all_is_well(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injection, "FACTS", injection.FACTS[:3])
    monkeypatch.setattr(injection, "QUESTIONS", injection.QUESTIONS[:1])
    done = CliRunner().invoke(main, ["doctor"])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "Healthy.")
    assert "16 of 16 next tokens as prefilled text" in done.stdout
