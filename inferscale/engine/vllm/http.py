"""vLLM behind its own OpenAI-compatible server."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from inferscale.config import VllmConfig
from inferscale.engine.vllm.transport import Call, CallFailed, Tokens, Transport
from inferscale.errors import ConfigError, EngineUnavailable, InvalidInput

CONNECT_SECONDS = 2.0
PROBE_SECONDS = 1.0
METRIC = "vllm:inferscale_hits"
"""A metric that only a server with our connector has."""


class HttpTransport(Transport):
    """Generates through `/v1/completions`, streaming. A thread asks once a second whether the server is there."""

    def __init__(self, config: VllmConfig) -> None:
        """Attach to `config.url`. Raises EngineUnavailable if nobody answers, ConfigError if it cannot inject."""
        assert config.url is not None
        self._url = config.url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        timeout = httpx.Timeout(config.answer_seconds, connect=CONNECT_SECONDS, pool=config.answer_seconds)
        # Shorter than vLLM keeps an idle connection: none is used that it is about to close.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=4.0)
        self._client = httpx.Client(base_url=self._url, headers=headers, timeout=timeout, limits=limits)
        self._down: str | None = None
        self._closed = threading.Event()
        try:
            self.model, self.max_model_len = self._served()
            self._require_connector()
        except BaseException:
            self._client.close()
            raise
        self._probe = threading.Thread(target=self._watch, name="inferscale-probe", daemon=True)
        self._probe.start()

    def generate(self, call: Call) -> Generator[Tokens]:
        body = self._body(call)
        with self._reported(), self._client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                raise _refusal(reply.status_code, reply.read())
            yield from _tokens(reply.iter_lines())

    def health(self) -> str | None:
        return self._down

    def close(self) -> None:
        self._closed.set()
        self._client.close()

    def _body(self, call: Call) -> dict[str, Any]:
        sampling = call.sampling
        body = {
            "model": self.model,
            "prompt": call.prompt_ids,
            "max_tokens": call.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop_token_ids": call.ends,
            # A server takes these from the model's generation_config unless it is told.
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if call.plan is not None:
            body |= {"kv_transfer_params": call.transfer_params, "cache_salt": call.salt}
        return body

    def _served(self) -> tuple[str, int]:
        model = self._get("/v1/models").json()["data"][0]
        return str(model["id"]), int(model["max_model_len"])

    def _require_connector(self) -> None:
        if METRIC not in self._get("/metrics").text:
            raise ConfigError(
                f"The vLLM server at {self._url} runs without InferScale's connector; start it with "
                "`inferscale serve --engine vllm`, or add the flags that docs/serve.md shows."
            )

    def _get(self, path: str) -> httpx.Response:
        with self._reported():
            reply = self._client.get(path, timeout=CONNECT_SECONDS)
        if reply.status_code != 200:
            raise _refusal(reply.status_code, reply.content)
        return reply

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Transport errors as EngineUnavailable."""
        try:
            yield
        except httpx.TimeoutException as error:
            raise EngineUnavailable(f"The vLLM server at {self._url} does not answer; try again later.") from error
        except (httpx.TransportError, httpx.StreamError) as error:
            self._down = f"The vLLM server at {self._url} is gone."
            raise EngineUnavailable(f"{self._down} Try again when it is back.") from error

    def _watch(self) -> None:
        while not self._closed.wait(PROBE_SECONDS):
            try:
                self._get("/health")
                self._down = None
            except EngineUnavailable as error:
                self._down = str(error)
            except Exception:  # closed meanwhile
                return


def _tokens(lines: Iterator[str]) -> Iterator[Tokens]:
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise CallFailed(f"vLLM gave up in mid-answer ({chunk['error'].get('message')}); try again.")
        for choice in chunk["choices"]:
            if ids := choice.get("token_ids"):
                yield Tokens(tuple(ids))
        if usage := chunk.get("usage"):
            yield Tokens(cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"))


def _refusal(status: int, content: bytes) -> Exception:
    try:
        value = json.loads(content)
        message = str(value.get("error", value).get("message", value))
    except (ValueError, AttributeError):
        message = content[:200].decode("utf-8", "replace")
    if status in (401, 403):
        return ConfigError(f"The vLLM server refuses our key ({status}); pass its key as vllm.api_key.")
    if 400 <= status < 500 and status not in (404, 408, 429):
        return InvalidInput(f"vLLM refuses the request: {message}")
    return EngineUnavailable(f"vLLM answers with {status} ({message}); try again later.")
