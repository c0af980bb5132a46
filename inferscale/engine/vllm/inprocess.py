"""vLLM's own asynchronous engine, driven from a thread of this process; scheduler and workers are its children."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine, Generator
from contextlib import suppress
from typing import Any
from uuid import uuid4

from inferscale.config import VllmConfig
from inferscale.engine.vllm.compat import require_vllm, shut_down
from inferscale.engine.vllm.launch import engine_args
from inferscale.engine.vllm.transport import Call, CallFailed, Tokens, Transport
from inferscale.errors import EngineUnavailable, InferScaleError, InvalidInput
from inferscale.models import ModelFolder

CLOSE_SECONDS = 10.0
_END = object()


class InProcessTransport(Transport):
    """An `AsyncLLM` on an event loop of its own."""

    def __init__(self, folder: ModelFolder, dtype: str, config: VllmConfig) -> None:
        """Start vLLM. Raises ConfigError if it is not installed, EngineUnavailable with the reason if it fails."""
        require_vllm()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="inferscale-vllm", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._llm = self._wait(self._make(engine_args(folder, dtype, config)), config.start_seconds)
        except InferScaleError:
            self._stop_loop()
            raise
        except Exception as error:
            self._stop_loop()
            raise EngineUnavailable(f"vLLM did not start ({error}); its messages above say why.") from error
        self.max_model_len = int(self._llm.model_config.max_model_len)

    def generate(self, call: Call) -> Generator[Tokens]:
        got: queue.SimpleQueue[Any] = queue.SimpleQueue()
        running = asyncio.run_coroutine_threadsafe(self._pump(call, got), self._loop)
        try:
            while (item := got.get()) is not _END:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            running.cancel()  # vLLM aborts a request whose reader is gone

    def health(self) -> str | None:
        if self._closed:
            return "The engine is closed."
        return "vLLM's engine process died; start again." if self._llm.errored else None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stop_loop()  # first, or the reader of its outputs would report a dead engine
        with suppress(Exception):
            shut_down(self._llm)
        self._llm = None

    async def _make(self, args: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))

    async def _pump(self, call: Call, got: queue.SimpleQueue[Any]) -> None:
        """Hand outputs over until there are no more."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            prompt: dict[str, Any] = {"prompt_token_ids": list(call.prompt_ids)}
            if call.salt is not None:
                prompt["cache_salt"] = call.salt
            async for output in self._llm.generate(prompt, _params(call), f"inferscale-{uuid4().hex}"):
                answer = output.outputs[0]
                got.put(Tokens(tuple(answer.token_ids), output.num_cached_tokens))
                if answer.finish_reason == "error":
                    got.put(CallFailed("vLLM gave up in mid-answer; try again."))
        except EngineDeadError as error:
            got.put(_because(EngineUnavailable("vLLM's engine process died; start again."), error))
        except ValueError as error:
            got.put(_because(InvalidInput(f"vLLM refuses the request: {error}"), error))
        except Exception as error:
            got.put(_because(EngineUnavailable(f"vLLM gave up in mid-answer ({error}); try again."), error))
        finally:
            got.put(_END)

    def _wait(self, work: Coroutine[Any, Any, Any], seconds: float) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def _stop_loop(self) -> None:
        async def cancel_all() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        with suppress(Exception):
            self._wait(cancel_all(), CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


def _params(call: Call) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=call.max_tokens,
        temperature=call.sampling.temperature,
        top_p=call.sampling.top_p,
        seed=call.sampling.seed,
        stop_token_ids=list(call.ends),
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
        extra_args=None if call.plan is None else {"kv_transfer_params": call.transfer_params},
    )


def _because(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error
