"""The command line, run as people and scripts run it: against the real small model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import inferscale
from inferscale import Engine
from inferscale.cli import main
from inferscale.cli.session import shown
from inferscale.engine.transformers import TransformersEngine

COMMANDS = ["demo", "chat", "add", "search", "list", "forget", "encode", "serve", "bench", "models", "doctor"]
COMMAND = [sys.executable, "-m", "inferscale"]
FACTS = ["Rex is a collie.", "Tom lives in Lisbon.", "Ana plays the cello."]


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> Iterator[None]:
    """Commands that run in this process share a loaded model: loading takes longer than what they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "from_pretrained", staticmethod(lru_cache(Engine.from_pretrained)))
        patch.setattr(TransformersEngine, "close", lambda _: None)  # the next command gets the same engine
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, model_path: Path, loaded_once: None) -> Path:
    """A store in which alice has three memories."""
    path = tmp_path_factory.mktemp("cli") / "store"
    done = run("add", *FACTS, "--extract", "none", "--user", "alice", store=path)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("+ ") == 3
    return path


def run(*arguments: str | Path, store: Path | None = None, stdin: str | bytes | None = None) -> Result:
    where = ["--store", str(store)] if store else []
    return CliRunner().invoke(main, [*map(str, arguments), *where], input=stdin, catch_exceptions=False)


def run_json(*arguments: str, store: Path | None = None, stdin: str | bytes | None = None) -> dict[str, Any]:
    done = run(*arguments, "--json", store=store, stdin=stdin)
    value = json.loads(done.stdout)
    assert isinstance(value, dict)
    return value


def one_line(done: Result) -> str:
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("inferscale: ")
    return lines[0]


# --- help ---


def test_help_needs_no_model_library() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom inferscale.cli import main\n"
        f"for name in ([], *([name] for name in {COMMANDS})):\n"
        "    assert CliRunner().invoke(main, [*name, '--help']).exit_code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'sentence_transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_in_one_line_what_a_command_is_for_and_gives_an_example(command: str) -> None:
    text = run(command, "--help").stdout
    purpose = text.split("\n\n")[1].strip()
    assert purpose.endswith(".")
    assert f"inferscale {command}" in text.split("Example:")[1]


def test_help_documents_the_exit_codes_and_version_is_the_package_version() -> None:
    text = run("--help").stdout
    assert all(f"  {code} " in text for code in (0, 1, 2, 3, 4, 5, 70, 130))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert run("--version").stdout.strip().endswith(inferscale.__version__)


# --- the memory commands ---


def test_search_gives_the_best_first_and_list_the_oldest_first(store: Path) -> None:
    found = run_json("search", "Which", "breed", "is", "Rex?", "--top-k", "2", "--user", "alice", store=store)
    assert (found["results"][0]["memory"], len(found["results"])) == (FACTS[0], 2)
    listed = run("list", "--user", "alice", store=store)
    assert [line.split("  ", 1)[1] for line in listed.stdout.splitlines()] == FACTS


def test_finding_nothing_ends_with_1(store: Path) -> None:
    done = run("list", "--user", "nobody", store=store)
    assert (done.exit_code, done.stdout) == (1, "")
    assert run_json("search", "Rex", "--threshold", "0.99", "--user", "alice", store=store) == {"results": []}


def test_chat_answers_from_injected_memories_and_says_how(store: Path) -> None:
    reply = run_json("chat", "Which breed is Rex?", "--user", "alice", store=store)
    assert "collie" in reply["text"].lower()
    assert reply["injected_tokens"] > 30
    assert reply["fallback"] is None
    done = run("chat", "Which breed is Rex?", "--user", "alice", "--mode", "text", "--max-tokens", "3", store=store)
    assert done.stdout.strip()
    assert "prefilled · first token after" in done.stderr


def test_a_conversation_keeps_its_history_shows_memories_and_remembers(store: Path) -> None:
    lines = "/memories\nWhich breed is Rex?\n/memories\n/what\nAnd Tom?\n/quit\nnever asked\n"
    options = ("--user", "talker", "--remember", "--max-tokens", "4")
    done = run("chat", *options, store=store, stdin=lines)
    assert done.exit_code == 0, done.stderr
    assert "no memories were used yet" in done.stderr
    assert "/what?" in done.stderr
    assert "2 memories added for user talker" in done.stderr
    texts = [item["memory"] for item in run_json("list", "--user", "talker", store=store)["results"]]
    assert texts == ["user: Which breed is Rex?", "user: And Tom?"]


def test_text_survives_from_stdin_to_json_and_cannot_drive_the_terminal(store: Path) -> None:
    given = "nul\0 and \x1b[31mred\n\nשמש בים 👩‍👩‍👧 café\n".encode()
    added = run_json("add", "-", "--extract", "none", "--user", "odd", store=store, stdin=given)
    assert [result["memory"] for result in added["results"]] == ["nul and \x1b[31mred", "שמש בים 👩‍👩‍👧 café"]
    assert (added["waiting"], added["failed"]) == (0, {})
    done = run("list", "--user", "odd", store=store)
    assert "שמש בים 👩‍👩‍👧 café" in done.stdout
    assert "\x1b" not in done.stdout


def test_shown_text_has_no_control_characters_but_keeps_lines() -> None:
    assert shown("a\x1b[2Jb\x07\u202ec\n\td") == "a\\u001b[2Jb\\u0007\\u202ec\n\td"


def test_adding_twice_adds_once_from_messages_and_from_observations(store: Path, tmp_path: Path) -> None:
    messages, locomo = tmp_path / "messages.json", tmp_path / "locomo.json"
    messages.write_text(json.dumps([{"role": "user", "content": "I moved to Oslo.", "time": "May 2024"}]))
    talk = {
        "speaker_a": "Ann", "session_1_date_time": "8 May 2023",
        "session_1": [{"speaker": "Ann", "dia_id": "D1:1", "text": "I sold my boat. It was old."}],
    }  # fmt: skip
    seen = {"session_1_observation": {"Ann": [["Ann sold her boat.", "D1:1"], ["Ann sold her boat.", "D1:1"]]}}
    locomo.write_text(json.dumps({"conversation": talk, "observation": seen}))
    for events in (["ADD", "ADD", "NONE", "ADD", "ADD"], ["NONE"] * 5):
        results = [
            *run_json("add", "--file", str(messages), "--user", "filer", store=store)["results"],
            *run_json("add", "--file", str(locomo), "--user", "filer", store=store)["results"],
            *run_json("add", "--file", str(locomo), "--extract", "verbatim", "--user", "filer", store=store)["results"],
        ]
        assert [result["event"] for result in results] == events
    listed = run_json("list", "--user", "filer", store=store)["results"]
    assert [item["memory"] for item in listed] == [
        "user: I moved to Oslo.", "Ann sold her boat.", "Ann: I sold my boat.", "Ann: It was old."
    ]  # fmt: skip
    assert {item["time"] for item in listed[1:]} == {"8 May 2023"}


def test_forgetting_asks_counts_and_stays_inside_the_owner(store: Path) -> None:
    ids = [r["id"] for r in run_json("add", "One.", "Two.", "Three.", "--user", "leaver", store=store)["results"]]
    foreign = run("forget", ids[0], "--user", "alice", store=store)
    assert foreign.exit_code == 1
    assert ids[0] in one_line(foreign)
    assert run("forget", ids[0], "no-such-id", "--user", "leaver", store=store).exit_code == 1
    assert run("forget", ids[0], "--user", "leaver", store=store).stdout == "1 memory forgotten\n"
    kept = run("forget", "--all", "--user", "leaver", store=store, stdin="n\n")
    assert (kept.exit_code, kept.stdout) == (1, "0 memories forgotten\n")
    assert "Forget 2 memories of user leaver" in kept.stderr
    assert run_json("forget", "--all", "--yes", "--user", "leaver", store=store) == {"forgotten": 2}


# --- errors ---


def test_a_model_that_is_not_there_ends_with_3(store: Path) -> None:
    done = run("list", "--model", "no-such/model", store=store)
    assert done.exit_code == 3
    assert "No model 'no-such/model' here" in one_line(done)


def test_a_store_of_another_recipe_ends_with_4_and_is_adopted_by_the_command_that_is_named(store: Path) -> None:
    done = run("list", "--user", "alice", "--dtype", "bfloat16", store=store)
    assert done.exit_code == 4
    assert f"inferscale encode --reencode --store {store}" in one_line(done)
    for dtype in ("bfloat16", "float32"):  # and back, for the other tests
        made = run_json("encode", "--reencode", "--dtype", dtype, store=store)
        assert made["encoded"] >= 3
        assert (made["waiting"], made["failed"]) == (0, {})


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["add", ""], "InvalidInput"),
        (["add", "x", "--user", " "], "InvalidScope"),
        (["add", "--file", __file__], "InvalidInput"),
    ],
)
def test_refused_input_ends_with_5(arguments: list[str], kind: str, store: Path) -> None:
    done = run(*arguments, "--json", store=store)
    assert done.exit_code == 5
    error = json.loads(done.stdout)["error"]
    assert error["type"] == kind
    assert one_line(done) == f"inferscale: {error['message']}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["add"],
        ["add", "x", "--file", __file__],
        ["forget"],
        ["forget", "x", "--all"],
        ["chat", "--json"],
        ["bench", "x"],
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_a_store_that_is_a_file_ends_with_4(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert run("list", store=file).exit_code == 4


def test_a_bug_is_one_line_with_70_and_a_traceback_only_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("inferscale.models.list_models", fail)
    done = run("models", "--json")
    assert done.exit_code == 70
    assert "RuntimeError: boom" in one_line(done)
    assert json.loads(done.stdout)["error"]["type"] == "RuntimeError"
    monkeypatch.setenv("INFERSCALE_DEBUG", "1")
    assert "Traceback" in run("models").stderr


# --- signals and pipes ---


def test_an_interrupted_encode_ends_with_130_and_the_next_one_finishes(tmp_path: Path, model_path: Path) -> None:
    file, store = tmp_path / "messages.json", tmp_path / "store"
    texts = [f"In town number {n} there lives a baker with {n} red shoes and a dog called Rex {n}." for n in range(18)]
    file.write_text(json.dumps([{"role": "user", "content": text} for text in texts]))
    assert run("add", "--file", file, "--extract", "none", "--no-wait", "--quiet", store=store).exit_code == 0
    process = subprocess.Popen([*COMMAND, "encode", "--store", store], stderr=subprocess.PIPE, text=True)
    made, deadline = chunks(store), time.monotonic() + 60
    while chunks(store) == made and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "inferscale: interrupted\n")
    left = len(texts) - chunks(store)
    assert left > 0
    rest = run_json("encode", store=store)
    assert rest["waiting"] == 0
    assert rest["encoded"] >= left
    assert chunks(store) == len(texts)


def chunks(store: Path) -> int:
    return sum(1 for file in (store / "kv").rglob("*") if file.is_file() and ".tmp" not in file.parts)


def test_a_reader_that_leaves_early_is_no_error(store: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, "list", "--quiet", "--user", "alice", "--store", store],
        stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


# --- the tools ---


def test_models_and_bench_list_what_there_is() -> None:
    assert {"smollm2-135m-instruct", "all-minilm-l6-v2"} <= {m["name"] for m in run_json("models")["models"]}
    assert "retrieve" in run_json("bench")["benchmarks"]
    assert "retrieve" in run("bench").stdout.splitlines()


def test_bench_says_where_benchmarks_live_when_installed_from_a_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("inferscale.cli.tools.ROOT", tmp_path)
    done = run("bench", "retrieve")
    assert done.exit_code == 2
    assert "live in InferScale's repository" in done.stderr
