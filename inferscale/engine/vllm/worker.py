"""The connector's half in vLLM's workers: chunks are gathered, rotated and written into the paged cache by layer.

Of the composed KV no more than one layer ever exists beside the cache. A load that fails costs its own
request a prefill, and those that found its blocks in the same step: the blocks are reported, vLLM ends
these requests and forgets the blocks, and the engine asks again as text.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inferscale.core import PlanChunk
from inferscale.engine.vllm import compat
from inferscale.engine.vllm.chunks import ChunkReader, LayerKV
from inferscale.engine.vllm.metadata import Load
from inferscale.engine.vllm.plans import PlanBoard
from inferscale.engine.vllm.stats import InjectionStats
from inferscale.errors import PlanRejected

log = logging.getLogger("inferscale.engine.vllm")


class Injector:
    """Writes the loads of each step into one worker's cache."""

    def __init__(self, config: Any, root: Path, block_size: int, device_bytes: int, host_bytes: int) -> None:
        """`config` is the VllmConfig, `root` the folder of the KV files; budgets as in `ChunkReader`."""
        self.stats = InjectionStats()
        self._config = config
        self._root = root
        self._board = PlanBoard(root)
        self.block_size = block_size
        self._budgets = (device_bytes, host_bytes)
        self._failed: set[int] = set()
        self._reader: ChunkReader | None = None

    def register(self) -> None:
        """The engine's cache is there: take hold of its layers. UnsupportedModel if they cannot be written."""
        shape = compat.shape_of(self._config)
        self.rope = compat.rope_of(shape.head_dim)
        names, self.layers = compat.attention_layers(self._config, shape.layers)
        self.layer_of = {name: layer for layer, name in enumerate(names)}
        self.shape = shape
        self._reader = ChunkReader(self._root, shape, *self._budgets)

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self.shape.device

    def fetch(self, loads: Sequence[Load]) -> Step | None:
        """Fetch what the loads need; the step that writes it, or None if there is nothing to write."""
        began = time.perf_counter()
        parts: list[tuple[Load, list[LayerKV]]] = []
        for load in loads:
            try:
                parts.append((load, self._fetched(load)))
            except PlanRejected as error:
                self.fail([load], error.reason, str(error))
            except Exception as error:  # no fault of a load may reach the engine
                self.fail([load], "load_failed", repr(error))
        self.stats.add(seconds=time.perf_counter() - began)
        return Step(self, parts) if parts else None

    def fail(self, loads: Sequence[Load], reason: str, why: str) -> None:
        """Give loads up: vLLM ends their requests, which are then asked as text; the planner is told why."""
        for load in loads:
            log.warning("KV of a plan was not loaded (%s): %s The prompt is prefilled as text.", reason, why)
            # What follows the load is computed from it in this step, and as wrong.
            self._failed.update(load.blocks[load.start // self.block_size :])
            self.stats.add(failures=1)
            self._board.note(load.plan, reason)

    def take_failed(self) -> set[int]:
        """The blocks of failed loads since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Let go of files and memory. Idempotent."""
        if self._reader is not None:
            self._reader.close()

    def _fetched(self, load: Load) -> list[LayerKV]:
        assert self._reader is not None, "vLLM registers its cache before it asks for a load"
        needed: list[PlanChunk] = [chunk for chunk in load.chunks if chunk.start + chunk.length > load.start]
        return self._reader.read(needed)


class Step:
    """All loads of one step, to be written layer by layer; every layer's tensors are gathered once for all of them."""

    def __init__(self, injector: Injector, parts: Sequence[tuple[Load, Sequence[LayerKV]]]) -> None:
        self._injector = injector
        self._loads = [load for load, _ in parts]
        shape = injector.shape
        size = injector.block_size
        self._chunks = [kv for _, chunks in parts for kv in chunks]
        slots, positions, kept, at = [], [], [], 0
        for load, chunks in parts:
            gathered = sum(len(kv.keys[0]) for kv in chunks)
            # The first chunk may begin before the load: the engine's own prefix cache has its first tokens.
            kept.append((at + gathered - (load.end - load.start), at + gathered))
            at += gathered
            place = torch.arange(load.start, load.end)
            positions.append(place)
            slots.append(torch.tensor(load.blocks)[place // size] * size + place % size)
        self._kept = kept if sum(end - start for start, end in kept) < at else None
        self._positions = torch.cat(positions).to(shape.device)
        self._slots = torch.cat(slots).to(shape.device)
        rows = (at, shape.heads.stop - shape.heads.start, shape.head_dim)
        self._keys = torch.empty(rows, dtype=shape.dtype, device=shape.device)
        self._values = torch.empty_like(self._keys)

    @property
    def layers(self) -> int:
        """Layers to write."""
        return len(self._injector.layers)

    def write(self, layer: int) -> None:
        """One layer, from chunks to the paged cache."""
        injector = self._injector
        keys = self._gathered([kv.keys[layer] for kv in self._chunks], self._keys)
        values = self._gathered([kv.values[layer] for kv in self._chunks], self._values)
        rotated = compat.rotate(injector.rope, self._positions, keys)
        compat.write(injector.layers[layer], rotated, values, self._slots)

    def finish(self) -> None:
        """Count what was written."""
        token_bytes = 2 * self._keys[0].nbytes * len(self._injector.layers)
        self._injector.stats.add(bytes=len(self._slots) * token_bytes)

    def give_up(self, error: Exception) -> None:
        """Whatever was written of it, none of it counts."""
        self._injector.fail(self._loads, "load_failed", repr(error))

    def _gathered(self, parts: list[Tensor], scratch: Tensor) -> Tensor:
        torch.cat(parts, out=scratch)
        if self._kept is None:
            return scratch
        return torch.cat([scratch[start:end] for start, end in self._kept])


class Whole:
    """Writes a step before the forward pass begins."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector

    def start(self, step: Step) -> None:
        """Write everything."""
        began = time.perf_counter()
        try:
            for layer in range(step.layers):
                step.write(layer)
            step.finish()
        except Exception as error:  # no fault of a load may reach the engine
            step.give_up(error)
        self._injector.stats.add(seconds=time.perf_counter() - began)

    def wait_for(self, layer: int) -> None:
        """Nothing is under way."""

    def join(self) -> None:
        """Nothing is under way."""


class Layered:
    """Writes a step while the forward pass runs, which waits for each layer before it attends to it.

    On CUDA a stream of its own writes, elsewhere a thread. vLLM must run the layers one by one from
    Python for it: no graph may span two of them.
    """

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self._stream = _stream() if injector.device.type == "cuda" else None
        self._written: list[Any] = []
        self._thread: threading.Thread | None = None

    def start(self, step: Step) -> None:
        """Begin."""
        if self._stream is None:
            self._written = [threading.Event() for _ in range(step.layers)]
            self._thread = threading.Thread(target=self._write, args=(step,), name="inferscale-load")
            self._thread.start()
            return
        self._written = [_event() for _ in range(step.layers)]
        self._stream.wait_stream(torch.cuda.current_stream())  # what is freed to us may still be read there
        with torch.cuda.stream(self._stream):
            self._write(step)

    def wait_for(self, layer: int) -> None:
        """Before the forward pass attends to this layer."""
        if not self._written:
            return
        if self._stream is None:
            self._written[layer].wait()
        else:
            torch.cuda.current_stream().wait_event(self._written[layer])

    def join(self) -> None:
        """After the forward pass."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._stream is not None and self._written:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._written = []

    @torch.inference_mode()  # vLLM's own does not reach into another thread, and its cache is written in no other
    def _write(self, step: Step) -> None:
        began = time.perf_counter()
        try:
            for layer, written in enumerate(self._written):
                step.write(layer)
                written.set() if self._stream is None else written.record()
            step.finish()
        except Exception as error:  # no fault of a load may reach the engine
            step.give_up(error)
        finally:
            for written in self._written if self._stream is None else ():
                written.set()
        self._injector.stats.add(seconds=time.perf_counter() - began)


def _stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
