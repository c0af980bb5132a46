"""`examine` looks at an installation, a model and a store, and says what is wrong in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from inferscale.doctor import installation
from inferscale.doctor.report import Check, Report, guarded

if TYPE_CHECKING:
    from inferscale.engine.base import Engine

__all__ = ["Check", "Report", "examine"]


def examine(
    engine_or_model: Engine | str | Path,
    *,
    store: Path | None = None,
    dtype: str | None = None,
    device: str | None = None,
    on_check: Callable[[Check], None] = lambda check: None,
) -> Report:
    """Look at everything; `on_check` is told of each check as it is done. Raises nothing for what is broken.

    `store` is opened and counted if given, and not changed. `dtype` and `device` are those of
    `Engine.from_pretrained`, for a model that is not loaded yet.
    """
    done: list[Check] = []
    for check in _checks(engine_or_model, store, dtype, device):
        done.append(check)
        on_check(check)
    return Report(tuple(done))


def _checks(
    engine_or_model: Engine | str | Path, store: Path | None, dtype: str | None, device: str | None
) -> Iterator[Check]:
    yield installation.check_python()
    packages = list(installation.check_packages())
    yield from packages
    yield guarded("home", installation.check_home)
    yield guarded("sqlite", installation.check_sqlite)
    if any(check.status == "fault" for check in packages):
        yield Check("model", "warning", "not looked at: mend the packages first")
        return
    yield guarded("threads", installation.check_threads)
    yield guarded("embedder", installation.check_embedder)
    loaded: list[Engine] = []

    def load() -> Check:
        loaded.append(_engine(engine_or_model, dtype, device))
        return installation.check_model(loaded[0])

    yield guarded("model", load)
    if store is not None:
        yield guarded("store", lambda: installation.check_store(store, loaded[0] if loaded else None))
    if loaded:
        yield from _injection(loaded[0])


def _engine(engine_or_model: Engine | str | Path, dtype: str | None, device: str | None) -> Engine:
    from inferscale.engine.base import Engine

    if isinstance(engine_or_model, Engine):
        return engine_or_model
    return Engine.from_pretrained(engine_or_model, dtype=dtype, device=device)


def _injection(engine: Engine) -> Iterator[Check]:
    from inferscale.doctor import injection
    from inferscale.engine.transformers import TransformersEngine

    if not isinstance(engine, TransformersEngine):
        yield Check("injection", "note", f"not looked at for {type(engine).__name__}")
        return
    yield guarded("decoder", lambda: injection.check_decoder(engine))
    yield guarded("exact", lambda: injection.check_exact(engine))
    yield guarded("composed", lambda: injection.check_composed(engine))
