"""Text → unit vectors: a local sentence-transformers folder or an OpenAI-compatible endpoint."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from inferscale.core import clean_text, digest, one_line
from inferscale.errors import ConfigError, EmbeddingError, InvalidInput, ModelDamaged, ModelNotFound
from inferscale.index.base import unit_rows

if TYPE_CHECKING:
    from openai import OpenAI

Matrix: TypeAlias = npt.NDArray[np.float32]

CHARS_PER_TOKEN = 32
"""More characters than a token of running text ever takes: what is cut off, the encoder would cut too."""
DECIDING_FILES = ("config.json", "modules.json", "sentence_bert_config.json", "tokenizer.json", "vocab.txt")
"""Files beside the weights that change an embedding."""
MAX_REPLY_BYTES = 64 << 20
"""Of one embedding request."""


class Embedder(ABC):
    """Turns texts into vectors. Every method may be called from any thread."""

    name: str

    @property
    @abstractmethod
    def dim(self) -> int:
        """Numbers of a vector."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """32 hex digits; equal fingerprints give vectors that can be compared."""

    @abstractmethod
    def embed(self, texts: Sequence[str]) -> Matrix:
        """Vectors [len(texts), dim], float32, of length 1, in the order of `texts`.

        All or nothing: EmbeddingError names the texts (by position) that have no vector; no text is
        dropped. Raises InvalidInput for a blank text. A text beyond the model's length is cut at its end.
        """


class SentenceTransformerEmbedder(Embedder):
    """A sentence-transformers folder, read offline."""

    def __init__(self, path: str | Path, device: str = "cpu", *, name: str | None = None, batch_size: int = 32) -> None:
        """Raises ModelNotFound if `path` is no model folder, ModelDamaged if it cannot be loaded."""
        self.path = Path(path)
        self.name = name or self.path.name
        self._batch_size = batch_size
        self._lock = threading.Lock()  # a fast tokenizer raises "Already borrowed" when two threads share it
        if not (self.path / "config.json").is_file():
            raise ModelNotFound(f"{self.path} is no sentence-transformers folder; pass a folder that has config.json.")
        from sentence_transformers import SentenceTransformer

        from inferscale.decoder.transformers import quiet  # it loads through transformers, bars and all

        try:
            with quiet():
                self._model = SentenceTransformer(str(self.path), device=device, local_files_only=True)
        except Exception as error:  # the libraries below raise anything from OSError to SafetensorError
            raise ModelDamaged(f"The encoder in {self.path} cannot be loaded ({error}); fetch it again.") from error
        self._max_chars = CHARS_PER_TOKEN * int(self._model.max_seq_length or 512)

    @cached_property
    def dim(self) -> int:
        """See `Embedder.dim`."""
        return int(self._model.get_embedding_dimension() or 0)

    @cached_property
    def fingerprint(self) -> str:
        """See `Embedder.fingerprint`; digests the weights and what decides how they are used."""
        files = [f for kind in ("*.safetensors", "*.bin") for f in self.path.rglob(kind)]
        files += [f for wanted in DECIDING_FILES for f in self.path.rglob(wanted)]
        sums = {}
        for file in files:
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
            sums[file.relative_to(self.path).as_posix()] = content.hexdigest()
        return digest(["sentence-transformers", sums])

    def embed(self, texts: Sequence[str]) -> Matrix:
        """See `Embedder.embed`."""
        cut = _checked(texts, self._max_chars)
        if not cut:
            return np.zeros((0, self.dim), dtype=np.float32)
        vectors: Any
        with self._lock:
            try:
                vectors = self._model.encode(cut, batch_size=self._batch_size, show_progress_bar=False)
            except Exception:  # find the text that the batch failed on
                vectors = _one_by_one(self._encode_one, cut, 0, Exception)
        return _unit(vectors, len(cut), self.dim, self.name)

    def _encode_one(self, text: str) -> Any:
        return self._model.encode([text], show_progress_bar=False)[0]


class OpenAIEmbedder(Embedder):
    """An OpenAI-compatible `/embeddings` endpoint. Waits are bounded by `timeout` and `retries`."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str = "",
        *,
        dim: int | None = None,
        timeout: float = 10.0,
        retries: int = 2,
        batch_size: int = 64,
        max_chars: int = 8000,
    ) -> None:
        """`timeout` is in seconds a request; `dim` None asks the endpoint once; texts are cut at `max_chars`."""
        if timeout <= 0 or retries < 0 or batch_size < 1 or max_chars < 1:
            raise ConfigError("timeout, batch_size and max_chars must be above 0 and retries 0 or more.")
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ConfigError("The openai package is missing; run `pip install 'inferscale[openai]'`.") from error
        self.name = model
        self._url = base_url.rstrip("/")
        self._dim = dim
        self._timeout = timeout
        self._retries, self._batch_size, self._max_chars = retries, batch_size, max_chars
        # its own retries obey a Retry-After of up to a minute, so ours replace them
        self._client: OpenAI = OpenAI(base_url=self._url, api_key=api_key or "none", timeout=timeout, max_retries=0)

    @property
    def dim(self) -> int:
        """See `Embedder.dim`; the first call may ask the endpoint."""
        if self._dim is None:
            self._dim = len(self._request(["dimension"])[0])
        return self._dim

    @cached_property
    def fingerprint(self) -> str:
        """See `Embedder.fingerprint`; digests the address and the model's name."""
        return digest(["openai", self._url, self.name])

    def embed(self, texts: Sequence[str]) -> Matrix:
        """See `Embedder.embed`."""
        cut = _checked(texts, self._max_chars)
        vectors: list[Any] = []
        for start in range(0, len(cut), self._batch_size):
            batch = cut[start : start + self._batch_size]
            try:
                vectors += self._request(batch)
            except _Refused:  # one text can make the endpoint refuse its whole batch
                vectors += _one_by_one(lambda text: self._request([text])[0], batch, start, _Refused)
        return _unit(vectors, len(cut), self.dim, self.name)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _request(self, batch: list[str]) -> list[Any]:
        """One embedding a text, asked for again while the endpoint may recover."""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(min(0.1 * 2**attempt, 2.0))
            try:
                return self._parse(self._post(batch), len(batch))
            except _Unanswered as error:
                last = error
        raise last

    def _post(self, batch: list[str]) -> bytes:
        """The body of the reply; foreign errors become ours, _Unanswered if another try may help."""
        import openai

        where = f"The embedding endpoint {self._url}"
        try:
            return self._read(batch)
        except openai.APIStatusError as error:
            what = f"HTTP {error.status_code}: {one_line(error.message)[:200]}"
            if error.status_code in (400, 413, 422):
                raise _Refused(f"{self._url} refused it with {what}") from error
            kind = _Unanswered if error.status_code >= 500 or error.status_code in (408, 409, 429) else EmbeddingError
            raise kind(f"{where} answered {what}; check its address, key and log.") from error
        except openai.APIConnectionError as error:  # timeouts too
            raise _Unanswered(f"{where} did not answer ({one_line(str(error))}); check that it runs.") from error

    def _read(self, batch: list[str]) -> bytes:
        create = self._client.embeddings.with_streaming_response.create
        with create(model=self.name, input=batch, encoding_format="float") as reply:
            deadline = time.monotonic() + self._timeout  # the client's own timeout starts anew with every byte
            body = bytearray()
            parts = reply.iter_bytes()
            while (part := self._next(parts)) is not None:
                body += part
                if time.monotonic() > deadline or len(body) > MAX_REPLY_BYTES:
                    raise _Unanswered(f"The embedding endpoint {self._url} sends its reply too slowly or without end.")
        return bytes(body)

    def _next(self, parts: Iterator[bytes]) -> bytes | None:
        try:
            return next(parts, None)
        except Exception as error:  # the transport's own, which differs between versions of the client
            raise _Unanswered(f"The embedding endpoint {self._url} broke off its reply ({error}).") from error

    def _parse(self, body: bytes, count: int) -> list[Any]:
        try:
            data = json.loads(body)["data"]
            found = {int(item["index"]): item["embedding"] for item in data}
        except (ValueError, KeyError, TypeError) as error:
            raise EmbeddingError(
                f"{self._url} answered with something that is no list of embeddings; does the address end in /v1?"
            ) from error
        missing = [i for i in range(count) if not isinstance(found.get(i), list)]
        if missing:
            raise _Refused(f"{self._url} left out {len(missing)} of {count} embeddings")
        return [found[i] for i in range(count)]


class _Refused(EmbeddingError):
    """The endpoint works but has no vector for (some of) this batch."""


class _Unanswered(EmbeddingError):
    """The endpoint may answer if asked again."""


def _checked(texts: Sequence[str], max_chars: int) -> list[str]:
    """The texts as one line each, cut; whitespace goes first so that padding does not crowd out words."""
    if isinstance(texts, str):
        raise InvalidInput("embed takes a list of texts, not one string; pass [text].")
    return [one_line(clean_text(text, f"text {i}"))[:max_chars] for i, text in enumerate(texts)]


def _one_by_one(embed: Callable[[str], Any], texts: list[str], start: int, expected: type[Exception]) -> list[Any]:
    """Each text alone; EmbeddingError names those that fail as `expected`, after all were tried."""
    vectors: list[Any] = []
    failed: dict[int, Exception] = {}
    for place, text in enumerate(texts, start):
        try:
            vectors.append(embed(text))
        except expected as error:
            failed[place] = error
    if failed:
        first = next(iter(failed.values()))
        raise EmbeddingError(f"Texts {sorted(failed)} have no embedding: {one_line(str(first))}.") from first
    return vectors


def _unit(vectors: Any, count: int, dim: int, name: str) -> Matrix:
    """Vectors checked and scaled to length 1."""
    wrong = [i for i, vector in enumerate(vectors) if not _usable(vector, dim)]
    if wrong:
        raise EmbeddingError(f"{name} gave texts {wrong[:20]} vectors that are not {dim} finite numbers.")
    return unit_rows(np.asarray(vectors, dtype=np.float64).reshape(count, dim), count, dim)


def _usable(vector: Any, dim: int) -> bool:
    try:
        numbers = np.asarray(vector, dtype=np.float64)
    except (TypeError, ValueError):
        return False
    return numbers.shape == (dim,) and bool(np.isfinite(numbers).all())
