"""A worker's own way to the KV files: verified, cut to its heads, the hot ones kept on its device.

Forgetting is complete here too: an entry counts only while its file is the one it was read from, and a
thread drops, within a second, what has lost its file.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inferscale.core import ChunkKey, ChunkKV, PlanChunk
from inferscale.errors import PlanRejected
from inferscale.store import DiskStore
from inferscale.store.format import relative_path

SWEEP_SECONDS = 1.0
Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a chunk must look like (`kv_heads` of the whole model), and the part of it that this worker serves."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    heads: slice
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """One chunk by layer: keys before rotation and values, a tensor [n, G of this worker, D] for each layer."""

    whole: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @staticmethod
    def of(whole: Tensor) -> LayerKV:
        """From keys and values together, [2, L, n, G, D]."""
        return LayerKV(whole, whole[0].unbind(0), whole[1].unbind(0))


class ChunkReader:
    """Reads plans' chunks for one worker. `read` is called by one thread; the sweep runs in another."""

    def __init__(self, root: Path, shape: Shape, device_bytes: int, host_bytes: int) -> None:
        """`device_bytes` bounds the hot chunks on the worker's device, `host_bytes` those in pinned memory (CUDA)."""
        self._root = root
        self._shape = shape
        self._disk = DiskStore(root, budget_bytes=1 << 62)  # only read: the one who writes keeps the budget
        self._device = _Tier(device_bytes)
        self._host = _Tier(host_bytes if shape.device.type == "cuda" else 0)
        self._closed = threading.Event()
        threading.Thread(target=self._sweep, name="inferscale-sweep", daemon=True).start()

    def read(self, chunks: Sequence[PlanChunk]) -> list[LayerKV]:
        """Every chunk's KV on the device, in order; PlanRejected if one is missing or not as planned."""
        stamps = [self._stamp(chunk.key) for chunk in chunks]
        found = [self._device.get(chunk.key, stamp) for chunk, stamp in zip(chunks, stamps, strict=True)]
        absent = [i for i, kv in enumerate(found) if kv is None]
        for i in absent:
            if (kept := self._host.get(chunks[i].key, stamps[i])) is not None:
                found[i] = self._device.put(chunks[i].key, stamps[i], self._moved(kept))
        unread = [i for i in absent if found[i] is None]
        for i, kv in zip(unread, self._disk.get_many([chunks[i].key for i in unread]), strict=True):
            found[i] = self._admit(chunks[i], stamps[i], kv)
        return [kv for kv in found if kv is not None]

    def close(self) -> None:
        """Let go of files and memory. Idempotent."""
        self._closed.set()
        self._disk.close()

    def drop_lost(self) -> None:
        """Forget what has lost its file."""
        for tier in (self._device, self._host):
            tier.keep_only(lambda key: os.path.exists(self._path(key)))

    def _sweep(self) -> None:
        while not self._closed.wait(SWEEP_SECONDS):
            self.drop_lost()

    def _path(self, key: ChunkKey) -> str:
        return f"{self._root}/{relative_path(key)}"

    def _stamp(self, key: ChunkKey) -> Stamp:
        try:
            status = os.stat(self._path(key))
        except OSError:
            raise PlanRejected("missing_chunk", f"The KV of fact {key.fact} is not in the store.") from None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _admit(self, chunk: PlanChunk, stamp: Stamp, kv: ChunkKV | None) -> LayerKV:
        """What the store verified, checked against the plan, in memory of our own: a mapped file may be cut short."""
        shape = self._shape
        if kv is None:
            raise PlanRejected("missing_chunk", f"The KV of fact {chunk.key.fact} is not in the store.")
        expected = (shape.layers, chunk.length, shape.kv_heads, shape.head_dim)
        if tuple(kv.keys.shape) != expected or kv.keys.dtype != shape.dtype:
            raise PlanRejected("shape_mismatch", f"The KV of fact {chunk.key.fact} is not of this model's shape.")
        pin = shape.device.type == "cuda"
        parts = [part[:, :, shape.heads] for part in (kv.keys, kv.values)]
        whole = torch.empty((2, *parts[0].shape), dtype=shape.dtype, pin_memory=pin)
        for target, part in zip(whole, parts, strict=True):
            target.copy_(part)
        mine = LayerKV.of(whole)
        if pin:
            self._host.put(chunk.key, stamp, mine)
            mine = self._moved(mine)
        return self._device.put(chunk.key, stamp, mine)

    def _moved(self, kv: LayerKV) -> LayerKV:
        return LayerKV.of(kv.whole.to(self._shape.device, non_blocking=True))


class _Tier:
    """Chunks within a byte budget, the least recently used leaving first. Thread-safe."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._bytes = 0
        self._kept: OrderedDict[ChunkKey, tuple[Stamp, LayerKV]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: ChunkKey, stamp: Stamp) -> LayerKV | None:
        """The chunk, if it was read from the file that is there now."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            if kept[0] != stamp:
                self._drop(key)
                return None
            self._kept.move_to_end(key)
            return kept[1]

    def put(self, key: ChunkKey, stamp: Stamp, kv: LayerKV) -> LayerKV:
        """Keep a chunk if it fits; returns it."""
        with self._lock:
            self._drop(key)
            if kv.whole.nbytes <= self._budget:
                self._kept[key] = stamp, kv
                self._bytes += kv.whole.nbytes
            while self._bytes > self._budget:
                self._drop(next(iter(self._kept)))
        return kv

    def keep_only(self, wanted: Callable[[ChunkKey], bool]) -> None:
        """Drop what `wanted` denies."""
        with self._lock:
            keys = list(self._kept)
        lost = [key for key in keys if not wanted(key)]  # asks the file system, so nobody waits for it
        with self._lock:
            for key in lost:
                self._drop(key)

    def _drop(self, key: ChunkKey) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes -= kept[1].whole.nbytes
