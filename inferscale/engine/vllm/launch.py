"""How stock vLLM is told to load our connector: the same words for an engine in this process and for a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from inferscale.config import ConnectorConfig, VllmConfig, from_dict
from inferscale.errors import ConfigError
from inferscale.models import ModelFolder

RESERVED = ("model", "dtype", "kv_transfer_config")


def engine_args(folder: ModelFolder, dtype: str, config: VllmConfig) -> dict[str, Any]:
    """vLLM's engine arguments by their Python names. Raises ConfigError for an unknown connector setting."""
    if taken := [name for name in RESERVED if name in config.args]:
        raise ConfigError(f"vllm.args must not hold {taken[0]}; InferScale sets it.")
    connector = from_dict(ConnectorConfig, {**config.connector, "store": config.store})
    return {
        "model": str(folder.path),
        "dtype": dtype,
        **config.args,
        "kv_transfer_config": {
            "kv_connector": "InferScaleConnector",
            "kv_connector_module_path": "inferscale.engine.vllm.connector",
            "kv_role": "kv_both",
            # A request whose KV cannot be loaded ends before its first token, and is asked again as text. vLLM's other
            # way, "recompute", gives wrong tokens where steps are scheduled ahead or the runner keeps its own count of
            # computed tokens (CUDA's defaults; https://github.com/vllm-project/vllm/issues/49250).
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": asdict(connector),
        },
    }


def flags(args: Mapping[str, Any]) -> list[str]:
    """The same arguments for a command line: {"max_model_len": 4096} is --max-model-len 4096."""
    words: list[str] = []
    for name, value in args.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag[2:])
        elif value is not None:
            words += [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words
