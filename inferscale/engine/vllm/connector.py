"""What vLLM loads by `kv_connector_module_path`: a thin shell around `Planner` (scheduler) and `Injector` (workers).

Its settings, in vLLM's `kv_connector_extra_config`, are `inferscale.config.ConnectorConfig`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from inferscale.config import ConnectorConfig, from_dict
from inferscale.engine.vllm import compat
from inferscale.engine.vllm.metadata import Loads
from inferscale.engine.vllm.scheduler import Planner
from inferscale.engine.vllm.stats import InjectionMetrics, InjectionStats
from inferscale.engine.vllm.worker import Injector, Layered, Whole
from inferscale.models import fingerprint, resolve_model


class InferScaleConnector(KVConnectorBase_V1):
    """Injects plans' KV. One instance lives in vLLM's scheduler process and one in each worker process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        compat.require_vllm()
        compat.check_setup(vllm_config)
        settings = settings_of(vllm_config)
        root = Path(settings.store) / "kv"
        self._planner: Planner | None = None
        self._injector: Injector | None = None
        if role is KVConnectorRole.SCHEDULER:
            model = fingerprint(resolve_model(vllm_config.model_config.model).path)
            dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
            self._planner = Planner(root, model, dtype, settings.match_registered)
        else:
            block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            self._injector = Injector(vllm_config, root, block_size, settings.device_bytes, settings.host_bytes)
        self._layerwise = settings.layerwise
        self._writer: Whole | Layered | None = None
        self._cache: Any = None

    # --- in the scheduler ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, tuple(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.take_loads()

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._cache = kv_cache_manager

    def update_connector_output(self, connector_output: Any) -> None:
        """Blocks whose load failed leave the prefix cache, where they are from the moment they are allotted.

        vLLM sees to it itself unless their request was aborted in the meantime.
        """
        if connector_output.invalid_block_ids:
            self._cache.evict_blocks(connector_output.invalid_block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request)
        return False, None

    @property
    def _scheduler(self) -> Planner:
        assert self._planner is not None, "called in a worker"
        return self._planner

    # --- in a worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register()
        self._writer = Layered(self._worker) if self._layerwise else Whole(self._worker)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        step = self._worker.fetch(loads.loads) if loads.loads else None
        if step is not None and self._writer is not None:
            self._writer.start(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._layerwise and self._writer is not None:
            self._writer.wait_for(self._worker.layer_of[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing of the engine's own KV is kept."""

    def wait_for_save(self) -> None:
        if self._writer is not None:
            self._writer.join()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed()

    def shutdown(self) -> None:
        if self._injector is not None:
            self._injector.close()

    @property
    def _worker(self) -> Injector:
        assert self._injector is not None, "called in the scheduler"
        return self._injector

    # --- in both, and beside them ---

    def get_kv_connector_stats(self) -> InjectionStats | None:
        return (self._planner or self._worker).stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> InjectionStats:
        return InjectionStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> InjectionMetrics:
        return InjectionMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise", False))


def settings_of(vllm_config: Any) -> ConnectorConfig:
    """The connector's settings; ConfigError for an unknown key or a wrong type."""
    return from_dict(ConnectorConfig, vllm_config.kv_transfer_config.kv_connector_extra_config)
