"""`inferscale serve`: memory behind OpenAI's and Mem0's HTTP interfaces."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inferscale.cli.session import ModelChoice, Output, model_options, output_options, store_option
from inferscale.errors import ConfigError

if TYPE_CHECKING:
    from inferscale.config import VllmConfig
    from inferscale.engine.base import Engine

KEYS_VARIABLE = "INFERSCALE_API_KEYS"
Health = Callable[[], str | None]


@click.command(short_help="Answer over HTTP, with memory.")
@click.option(
    "--engine",
    type=click.Choice(["transformers", "vllm"]),
    default="transformers",
    show_default=True,
    help="What answers. vllm starts stock vLLM beside the gateway and keeps it running.",
)
@click.option("--engine-url", metavar="URL", help="A running vLLM server with InferScale's connector, instead.")
@click.option(
    "--engine-key", metavar="KEY", envvar="INFERSCALE_ENGINE_KEY", show_envvar=True, help="That server's key."
)
@click.option(
    "--vllm-arg",
    "vllm_args",
    metavar="NAME=VALUE",
    multiple=True,
    help="An argument of vLLM's, as often as needed: max_model_len=4096.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option(
    "--keys",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar=KEYS_VARIABLE,
    show_envvar=True,
    help='A JSON file with the tenant of each API key: {"<key>": "acme"}.',
)
@click.option(
    "--open", "open_to_all", is_flag=True, help="Serve other machines without keys: anybody reads everything."
)
@click.option("--max-concurrent", type=click.IntRange(1), default=64, show_default=True, help="Answers at once.")
@click.option("--max-waiting", type=click.IntRange(0), default=128, show_default=True, help="More get 429.")
@store_option
@model_options
@output_options
def serve(
    model: ModelChoice,
    store: Path | None,
    engine: str,
    engine_url: str | None,
    engine_key: str | None,
    vllm_args: tuple[str, ...],
    host: str,
    port: int,
    keys: Path | None,
    open_to_all: bool,
    max_concurrent: int,
    max_waiting: int,
    out: Output,
) -> None:
    """Serve /v1/chat/completions, /v1/completions, /memories and /search until Ctrl-C.

    \b
    Example:
      inferscale serve --engine vllm
      inferscale serve --engine vllm --vllm-arg max_model_len=4096 --host 0.0.0.0 --keys keys.json
    """
    try:
        from inferscale import serve as http
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; run: pip install 'inferscale[serve]'.") from None
    from inferscale.config import ServeConfig, VllmConfig, home
    from inferscale.memory import Memory

    if (engine_url or vllm_args) and engine != "vllm":
        raise click.UsageError("--engine-url and --vllm-arg need --engine vllm.")
    if engine_url and vllm_args:
        raise click.UsageError("--vllm-arg is for a vLLM that is started here; the one at --engine-url runs already.")
    accepted = http.ApiKeys({}) if keys is None else http.ApiKeys.from_file(keys)
    if not accepted and not open_to_all and not _is_loopback(host):
        raise click.UsageError(f"{host} is open to other machines: pass --keys, or --open if that is meant.")
    config = ServeConfig(host=host, port=port, max_concurrent=max_concurrent, max_waiting=max_waiting)
    folder = store or home() / "memory"
    settings = VllmConfig(store=str(folder), url=engine_url, api_key=engine_key, args=dict(map(_argument, vllm_args)))
    with http.listen(config) as server, _engine(model, engine, settings, out) as (answering, health):
        with out.busy("opening the store"):
            memory = Memory(answering, folder)
        with memory:
            http.serve(http.create_app(memory, config, accepted, health), config, server, lambda url: _say(url, out))
            out.note("stopped")


@contextmanager
def _engine(model: ModelChoice, kind: str, settings: VllmConfig, out: Output) -> Iterator[tuple[Engine, Health]]:
    """The engine that answers, and what says how it is."""
    with ExitStack() as stack:
        watched: list[Health] = []
        if kind == "vllm" and settings.url is None:
            from inferscale.engine.vllm.server import VllmServer

            server = VllmServer(model.name, model.dtype, model.device, settings)
            stack.callback(server.close)
            with out.busy("starting vLLM"):
                server.wait_ready()
            out.note(f"vLLM answers; its log is {server.log_path}")
            settings = server.attached(settings)
            watched.append(server.health)
        engine = model.load(out, kind, settings if kind == "vllm" else None)
        stack.callback(engine.close)
        watched.append(engine.health)
        yield engine, lambda: next((said for health in watched if (said := health()) is not None), None)


def _say(url: str, out: Output) -> None:
    out.result({"url": url, "pid": os.getpid()})
    out.line(f"serving on {url}")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _argument(text: str) -> tuple[str, Any]:
    """ "max_model_len=4096" as a name and a value; a value that is no JSON is text."""
    name, given, value = text.partition("=")
    if not given or not name.isidentifier():
        raise click.UsageError(f"--vllm-arg is NAME=VALUE, with vLLM's Python name, got {text!r}.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
