"""What the connector counts, carried to Prometheus by vLLM's own hook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

PLAIN = {
    "hits": "Requests whose plan was injected (or found whole in the prefix cache).",
    "tokens": "Tokens of KV handed to the workers instead of being prefilled.",
    "bytes": "Bytes of KV written into the paged cache, by all workers together.",
    "seconds": "Seconds that workers spent fetching, rotating and writing KV.",
    "failures": "Loads that a worker could not carry out; vLLM ends their requests, which are asked again as text.",
}
REFUSED = "refused."
"""Prefix of the keys that count refused plans, one key a reason."""


@dataclass
class InjectionStats(KVConnectorStats):
    """Counters since the last step: the keys of PLAIN, and "refused.<reason>"."""

    data: dict[str, Any] = field(default_factory=dict)

    def add(self, **counts: float) -> None:
        """Count."""
        for key, value in counts.items():
            self.data[key] = self.data.get(key, 0) + value

    def refuse(self, reason: str) -> None:
        """Count a plan that is not injected."""
        self.add(**{REFUSED + reason: 1})

    def take(self) -> InjectionStats | None:
        """What was counted since the last call; None if that is nothing."""
        if self.is_empty():
            return None
        taken, self.data = InjectionStats(self.data), {}
        return taken

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> InjectionStats:
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"inferscale {key}": round(value, 6) for key, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class InjectionMetrics(KVConnectorPromMetrics):
    """The counters as vllm:inferscale_<key>_total; refusals carry their reason as a label."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[Counter]
        self._plain = {
            key: create_metric_per_engine(
                make(name=f"vllm:inferscale_{key}", documentation=text, labelnames=labelnames), per_engine_labelvalues
            )
            for key, text in PLAIN.items()
        }
        self._refused = make(
            name="vllm:inferscale_refused",
            documentation="Requests whose plan was not injected but prefilled as text, by reason.",
            labelnames=[*labelnames, "reason"],
        )

    def observe(self, transfer_stats_data: Mapping[str, float], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            if key in self._plain:
                self._plain[key][engine_idx].inc(value)
            elif key.startswith(REFUSED):
                labels = [*self.per_engine_labelvalues[engine_idx], key.removeprefix(REFUSED)]
                self._refused.labels(*labels).inc(value)
