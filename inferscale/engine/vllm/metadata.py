"""What vLLM's scheduler process tells its workers in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from inferscale.core import PlanChunk


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens [`start`, `end`) of one request, to be written into its blocks; `blocks` are all its block ids in order.

    `start` is a multiple of the block size, `end` need not be.
    """

    request: str
    plan: str
    blocks: tuple[int, ...]
    start: int
    end: int
    chunks: tuple[PlanChunk, ...]


@dataclass(slots=True)
class Loads(KVConnectorMetadata):
    """The loads of one step."""

    loads: list[Load] = field(default_factory=list)
