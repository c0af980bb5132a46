"""Stock vLLM's own OpenAI-compatible server as a child of this process: started, watched, started again, ended."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from inferscale.config import VllmConfig
from inferscale.engine.base import placement
from inferscale.engine.vllm.compat import require_vllm
from inferscale.engine.vllm.launch import engine_args, flags
from inferscale.errors import EngineUnavailable
from inferscale.models import ModelFolder, resolve_model

log = logging.getLogger("inferscale.engine.vllm")

LOG_FILE = "vllm.log"
HOST = "127.0.0.1"
POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
TAIL_LINES = 12
MAX_DEATHS = 3
DEATHS_WITHIN = 600.0
"""Seconds: a server that dies `MAX_DEATHS` times within them is not started again."""


class VllmServer:
    """A child that serves one model with our connector, behind a key that only this process knows.

    Its output goes to `vllm.log` in the folder of the memories. If it dies it is started again, and
    the log says so with its last lines; `health` says what is the matter until it answers again.
    """

    def __init__(self, name_or_path: str | Path, dtype: str | None, device: str | None, config: VllmConfig) -> None:
        """Start it; returns at once, see `wait_ready`. Model, dtype and device as in `Engine.from_pretrained`.

        Raises ConfigError if vLLM is not installed, ModelNotFound.
        """
        require_vllm()
        folder, (_, kind) = resolve_model(name_or_path), placement(device, dtype)
        port = _free_port()
        self.url = f"http://{HOST}:{port}"
        self.log_path = Path(config.store) / LOG_FILE
        self._key = secrets.token_urlsafe(32)
        self._start_seconds = config.start_seconds
        self._command = _command(folder, kind, config, port)
        self._trouble: str | None = "vLLM is starting."
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._given_up = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.write_bytes(b"")
        self._child = self._started()
        self._watcher = threading.Thread(target=self._watch, name="inferscale-vllm-watch", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """The child's process id; it leads its group."""
        return self._child.pid

    def attached(self, config: VllmConfig) -> VllmConfig:
        """`config` for an engine that asks this server."""
        return replace(config, url=self.url, api_key=self._key)

    def wait_ready(self) -> None:
        """Wait until it answers. EngineUnavailable, with its last words, if it dies or is not ready in time."""
        deadline = time.monotonic() + self._start_seconds
        while (trouble := self.health()) is not None:
            if self._given_up.is_set():
                self.close()
                raise EngineUnavailable(f"vLLM did not start. {trouble}")
            if time.monotonic() > deadline:
                words = self._last_words()
                self.close()
                raise EngineUnavailable(
                    f"vLLM was not ready within {self._start_seconds:.0f} s; raise vllm.start_seconds, or see "
                    f"{self.log_path}, which ends:\n{words}"
                )
            time.sleep(POLL_SECONDS)

    def health(self) -> str | None:
        """None if it answers, else one sentence that says why not. Never waits."""
        return self._trouble

    def close(self) -> None:
        """End it and its children. Idempotent."""
        with self._lock:
            self._closed.set()
            _end(self._child)
        if threading.current_thread() is not self._watcher:
            self._watcher.join(STOP_SECONDS)

    def _started(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as output:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "VLLM_API_KEY": self._key},  # not a flag: those are seen by every user
            )

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            if self._child.poll() is not None:
                if not self._revived():
                    return
            elif self._trouble is not None and _answers(self.url):
                self._trouble = None

    def _revived(self) -> bool:
        """The child is dead: say so, and start it again unless that is hopeless or nobody wants it any more."""
        first = not self._deaths and self._trouble is not None  # it never answered: what it was given is wrong
        now = time.monotonic()
        self._deaths.append(now)
        again = not first and (len(self._deaths) < MAX_DEATHS or now - self._deaths[0] > DEATHS_WITHIN)
        what = f"vLLM ended with exit code {self._child.returncode}"
        more = "it is being started again" if again else "it is not started again"
        with self._lock:
            if self._closed.is_set():
                return False
            self._trouble = f"{what}; {more}. {self.log_path} ends:\n{self._last_words()}"
            if not first:  # else `wait_ready` raises it
                log.error("%s", self._trouble)
            _end(self._child)  # what it left of its group
            if again:
                self._child = self._started()
                self._trouble = f"{what}; {more}, see {self.log_path}."
            else:
                self._given_up.set()
        return again

    def _last_words(self) -> str:
        with suppress(OSError), self.log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            lines = file.read().decode("utf-8", "replace").splitlines()
            return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])
        return ""


def _command(folder: ModelFolder, dtype: str, config: VllmConfig, port: int) -> list[str]:
    args = engine_args(folder, dtype, config)
    served: dict[str, Any] = {
        "host": HOST,
        "port": port,
        "served_model_name": folder.name,
        "enable_prompt_tokens_details": True,  # how we learn that a plan was injected
        "disable_uvicorn_access_log": True,
    }
    return [sys.executable, "-m", "inferscale.engine.vllm.child", *flags({**served, **args})]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child and its whole group: kindly, then not."""
    for kind, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, kind)
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
            if kind is signal.SIGTERM:
                continue  # its workers may not have listened
    if child.stdin is not None:
        child.stdin.close()
