"""Checks of the machine: packages, folders, the model and a store. torch is imported only where it is looked at."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import platform
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscale.config import EncodeConfig, GiB, StoreConfig, home
from inferscale.doctor.report import Check, Status

if TYPE_CHECKING:
    from inferscale.engine.base import Engine

EMBEDDER = "all-minilm-l6-v2"
FREE_BELOW = 2 * GiB
"""Bytes of free disk that a few thousand memories want."""


def check_python() -> Check:
    """Which Python this is."""
    version = platform.python_version()
    return Check("python", "ok", f"{version}, {platform.system()} {platform.machine()}", {"version": version})


def check_packages() -> Iterator[Check]:
    """Every required package is there in a version that this one was made for."""
    from packaging.requirements import Requirement

    try:
        declared = [Requirement(line) for line in metadata.requires("inferscale") or ()]
    except metadata.PackageNotFoundError:
        yield Check("packages", "warning", "inferscale runs from a folder and is not installed; `pip install -e .`")
        return
    installed = {}
    for need in declared:
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            version = installed[need.name] = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            yield Check("packages", "fault", f"{need.name} is missing; run `pip install '{need}'`")
            continue
        if not need.specifier.contains(version, prereleases=True):
            yield Check("packages", "fault", f"{need.name} {version} is not {need.specifier}; `pip install '{need}'`")
    shown = ", ".join(f"{name} {installed[name]}" for name in ("torch", "transformers") if name in installed)
    yield Check("packages", "ok", f"{shown} and {max(0, len(installed) - 2)} more", {"versions": installed})


def check_home() -> Check:
    """The home folder can be written and has room."""
    folder = home()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Check("home", "fault", f"{folder} cannot be written; set INFERSCALE_HOME to a folder of yours")
    status: Status = "ok" if free >= FREE_BELOW else "warning"
    return Check("home", status, f"{folder}, {free / GiB:.1f} GiB free", {"path": str(folder), "free_bytes": free})


def check_sqlite() -> Check:
    """A write-ahead log needs shared memory and locks, which some network file systems lack."""
    with tempfile.TemporaryDirectory(dir=home(), prefix=".doctor-") as folder:
        connection = sqlite3.connect(Path(folder) / "probe.sqlite3")
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            connection.execute("CREATE TABLE probe (x)")
        finally:
            connection.close()
    version = sqlite3.sqlite_version
    if mode != "wal":
        return Check("sqlite", "fault", f"{version}: no write-ahead log on this file system; move INFERSCALE_HOME")
    return Check("sqlite", "ok", f"{version}, write-ahead log works", {"version": version})


def check_threads() -> Check:
    """Threads beyond the cores make torch ten times slower."""
    import torch

    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    data = {"threads": threads, "cores": cores, "cuda": torch.cuda.is_available()}
    gpu = f", {torch.cuda.get_device_name()}" if data["cuda"] else ""
    if threads > cores:
        return Check("threads", "warning", f"torch uses {threads} on {cores} cores; set OMP_NUM_THREADS={cores}", data)
    return Check("threads", "ok", f"{threads} of {cores} cores{gpu}", data)


def check_embedder() -> Check:
    """The encoder that search needs: it is there and computes."""
    vectors = embed(["Rex is a collie."])
    return Check("embedder", "ok", f"{EMBEDDER}, {vectors.shape[1]} dimensions", {"dim": int(vectors.shape[1])})


def check_model(engine: Engine) -> Check:
    """What was loaded."""
    spec = engine.spec
    detail = (
        f"{spec.name}: {spec.family}, {spec.layers} layers, {spec.dtype}, RoPE {spec.rope.kind}, context "
        f"{spec.max_positions:,}, {spec.kv_bytes_per_token / 1024:.1f} KiB of KV per token"
    )
    return Check("model", "ok", detail, asdict(spec))


def check_store(path: Path, engine: Engine | None) -> Check:
    """Count what a store holds, through its own doors and without the worker that `Memory` would start."""
    from inferscale.store import open_store

    if not (path / "catalog.sqlite3").is_file():
        return Check("store", "fault", f"{path} holds no memories; `inferscale add` makes a store")
    store = open_store(path, StoreConfig())
    try:
        facts = {fact.id for owner in store.catalog.scopes() for fact in store.catalog.list(owner)}
        usage = store.chunks.usage()
        recipe, made_by = store.catalog.meta_get("recipe"), store.catalog.meta_get("model")
        mine = engine.recipe(EncodeConfig()) if engine else None
        encoded = {key.fact for key in store.chunks.keys(mine.id if mine else None)}
    finally:
        store.close()
    data: dict[str, Any] = {
        "facts": len(facts),
        "waiting": len(facts - encoded),
        "bytes_per_token": usage.bytes_per_token,
    }
    data |= {"chunks": usage.chunks, "tokens": usage.tokens, "bytes": usage.bytes, "model": made_by}
    if mine is not None and recipe is not None and recipe != json.dumps(asdict(mine), sort_keys=True):
        detail = f"{path} was made with {made_by}; `inferscale encode --reencode` adopts it for this model"
        return Check("store", "warning", detail, data)
    detail = (
        f"{len(facts):,} memories, {len(facts - encoded):,} without KV, {usage.bytes / 2**20:,.1f} MiB, "
        f"{usage.bytes_per_token / 1024:.1f} KiB per token"
    )
    return Check("store", "ok", detail, data)


def embed(texts: Sequence[str]) -> Any:
    """Vectors [len(texts), dim] of the default embedder."""
    from inferscale.index.embed import SentenceTransformerEmbedder
    from inferscale.models import resolve_model

    return SentenceTransformerEmbedder(resolve_model(EMBEDDER).path, name=EMBEDDER).embed(texts)
