"""Settings as frozen values. Unknown keys are errors, never ignored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from inferscale.errors import ConfigError

T = TypeVar("T")

GiB = 1024**3


def home() -> Path:
    """Where models and memories live: $INFERSCALE_HOME, by default ~/.inferscale."""
    return Path(os.environ.get("INFERSCALE_HOME") or Path.home() / ".inferscale").expanduser()


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


class Checked:
    """A config dataclass whose fields must have the types that they are declared with."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
            plain = tuple(get_origin(k) or k for k in kinds)
            allowed = (*plain, int) if float in plain else plain
            if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in plain):
                shown = " or ".join(getattr(k, "__name__", str(k)) for k in plain)
                raise ConfigError(f"{type(self).__name__}.{name} must be {shown}, got {value!r}.")


@dataclass(frozen=True, slots=True)
class EncodeConfig(Checked):
    """How facts become KV. The defaults are the best found by `python -m evals.fidelity`."""

    window: int = 0
    """Turns before a fact's turn that the encoder attends to and discards."""
    companions: int = 5
    """Most similar facts of the same scope placed between header and fact, closest first."""
    mode: str = "streaming"
    """How turns are encoded: "exact" (one pass a fact) or "streaming" (each turn once)."""
    batch_tokens: int = 512
    """Tokens computed in one packed forward pass; a request that comes meanwhile waits for its end."""
    refresh_below: float = 0.5
    """Re-encode a fact when fewer than this share of its companions are still its companions."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        _require(self.window >= 0, "encode.window counts turns and must be 0 or more.")
        _require(self.companions >= 0, "encode.companions counts facts and must be 0 or more.")
        _require(self.mode in ("exact", "streaming"), 'encode.mode must be "exact" or "streaming".')
        _require(self.batch_tokens >= 1, "encode.batch_tokens must be 1 or more.")
        _require(0.0 <= self.refresh_below <= 1.0, "encode.refresh_below is a share between 0 and 1.")


@dataclass(frozen=True, slots=True)
class StoreConfig(Checked):
    """Where the bytes live and how many may lie there."""

    ram_bytes: int = 2 * GiB
    """Budget of the host tier in bytes; least recently used chunks leave first."""
    disk_bytes: int = 256 * GiB
    """Budget of the disk tier in bytes; least recently used chunks leave first and are rebuilt on demand."""
    busy_timeout: float = 5.0
    """Seconds to wait for another process's write before StoreBusy."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        _require(self.ram_bytes >= 0 and self.disk_bytes >= 0, "store budgets are bytes and must be 0 or more.")
        _require(self.busy_timeout > 0, "store.busy_timeout is in seconds and must be above 0.")


@dataclass(frozen=True, slots=True)
class RetrieveConfig(Checked):
    """What a query brings back."""

    top_k: int = 20
    """Facts per request."""
    token_budget: int | None = None
    """Most memory tokens per request; None leaves room for the query and the answer only."""
    hot: int = 0
    """Best-ranked facts left as ordinary text after the injected ones."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        _require(self.top_k >= 0, "retrieve.top_k counts facts and must be 0 or more.")
        _require(self.hot >= 0, "retrieve.hot counts facts and must be 0 or more.")
        _require(self.token_budget is None or self.token_budget >= 0, "retrieve.token_budget counts tokens.")


@dataclass(frozen=True, slots=True)
class Sampling(Checked):
    """How an answer is decoded."""

    max_tokens: int = 128
    """Most new tokens."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens whose probability reaches this."""
    seed: int | None = None
    """Same seed, same tokens, on one machine."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        _require(self.max_tokens >= 1, "max_tokens must be 1 or more.")
        _require(self.temperature >= 0, "temperature must be 0 or more.")
        _require(0 < self.top_p <= 1, "top_p must be above 0 and at most 1.")
        _require(all(isinstance(s, str) and s for s in self.stop), "stop must be a tuple of non-empty strings.")
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed must be between 0 and 2**63 - 1.")


@dataclass(frozen=True, slots=True)
class MemoryConfig(Checked):
    """Everything `Memory` can be told; see the parts."""

    encode: EncodeConfig = field(default_factory=EncodeConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    retrieve: RetrieveConfig = field(default_factory=RetrieveConfig)


@dataclass(frozen=True, slots=True)
class ConnectorConfig(Checked):
    """How vLLM's processes load KV: vLLM's `kv_connector_extra_config`."""

    store: str
    """Folder of the memories (`Memory.path`)."""
    device_bytes: int = GiB // 2
    """Budget of each worker's hot chunks, on its device, in bytes; beside vLLM's own cache."""
    host_bytes: int = 2 * GiB
    """Budget of each worker's chunks in pinned host memory, in bytes; CUDA only."""
    layerwise: bool = False
    """Write layer by layer while the forward pass runs; CUDA graphs are then captured piece by piece."""
    match_registered: bool = False
    """Inject into requests without parameters, too, if their cache_salt names a registered plan."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        _require(bool(self.store), "the connector's store must name the folder of the memories.")
        _require(self.device_bytes >= 0 and self.host_bytes >= 0, "the connector's budgets are bytes, 0 or more.")


@dataclass(frozen=True, slots=True)
class VllmConfig(Checked):
    """How vLLM is reached or started."""

    store: str = field(default_factory=lambda: str(home() / "memory"))
    """Folder of the memories that vLLM's processes read KV from: the `path` of every `Memory` of this engine."""
    url: str | None = None
    """A running vLLM server with InferScale's connector; None starts vLLM in this process's own children."""
    api_key: str | None = None
    """The key that the server at `url` asks for."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's engine arguments, by their Python names: {"max_model_len": 4096}."""
    connector: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ConnectorConfig` other than its store: {"device_bytes": 0}."""
    start_seconds: float = 900.0
    """Seconds that vLLM may take to start: it loads the model, and may compile it."""
    answer_seconds: float = 120.0
    """Seconds without a token after which a server at `url` counts as gone."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        _require(bool(self.store), "vllm.store must name the folder of the memories.")
        _require(self.url is None or self.url.startswith(("http://", "https://")), "vllm.url must begin with http://.")
        _require(self.start_seconds > 0 and self.answer_seconds > 0, "vllm's waits are in seconds, above 0.")


@dataclass(frozen=True, slots=True)
class ServeConfig(Checked):
    """How the HTTP gateway behaves."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8080
    """TCP port; 0 takes a free one."""
    max_body_bytes: int = 1 << 20
    """Largest request body in bytes; a larger one is answered with 413."""
    max_concurrent: int = 64
    """Requests answered at once."""
    max_waiting: int = 128
    """Requests that may wait for their turn; one more is answered with 429."""
    drain_seconds: float = 30.0
    """Seconds that a shutdown waits for streams that are being answered."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        _require(bool(self.host), "serve.host must not be empty.")
        _require(0 <= self.port < 1 << 16, "serve.port must be between 0 and 65535.")
        _require(self.max_body_bytes >= 1024, "serve.max_body_bytes must be 1024 or more.")
        _require(self.max_concurrent >= 1, "serve.max_concurrent must be 1 or more.")
        _require(self.max_waiting >= 0, "serve.max_waiting must be 0 or more.")
        _require(self.drain_seconds >= 0, "serve.drain_seconds must be 0 or more.")


def from_dict(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build a config dataclass from nested mappings; an unknown key raises ConfigError naming the known ones."""
    assert is_dataclass(kind)
    known = {f.name for f in fields(kind)}
    for key in values:
        if key not in known:
            raise ConfigError(f"Unknown option {key!r} for {kind.__name__}; known options: {', '.join(sorted(known))}.")
    hints = get_type_hints(kind)
    built = {
        key: from_dict(hints[key], value) if is_dataclass(hints[key]) and isinstance(value, Mapping) else value
        for key, value in values.items()
    }
    try:
        return kind(**built)
    except TypeError as error:
        raise ConfigError(f"{kind.__name__}: {error}.") from None
