"""Errors, interrupts and closed pipes become exit codes here, and nowhere else."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from contextlib import suppress
from typing import Any

import click

from inferscale.errors import (
    ConfigError,
    EmbeddingError,
    InferScaleError,
    InvalidInput,
    MemoryNotFound,
    ModelError,
    StoreError,
)

EXIT_CODES = """Exit codes:
  0    done
  1    the answer is no: nothing found, not confirmed, not encoded, a fault
  2    the command line is wrong, or an option is out of range
  3    a model is missing, damaged or not supported
  4    the store is of another model, busy, full or damaged
  5    the input is refused: empty text, no JSON, too long
  70   a bug in InferScale; please report it
  130  interrupted with Ctrl-C; the same command again goes on"""

NO, USAGE, MODEL, STORE, INPUT, BUG, INTERRUPTED = 1, 2, 3, 4, 5, 70, 130

_CODES = (
    (ConfigError, USAGE),
    (ModelError, MODEL),
    (EmbeddingError, MODEL),
    (StoreError, STORE),
    (InvalidInput, INPUT),
    (MemoryNotFound, NO),
)
_JSON = "inferscale.json"


def wants_json(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    """Callback of `--json`: notes it where an error is reported from."""
    context.meta[_JSON] = value
    return value


def print_json(value: Any) -> None:
    """One JSON object on stdout, in UTF-8 whatever the terminal speaks."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace") + b"\n")


class GuardedGroup(click.Group):
    """A group whose commands end with the exit codes above, and lists them in the order they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        debug = os.environ.get("INFERSCALE_DEBUG", "") not in ("", "0")
        logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="inferscale: %(message)s")
        if debug:  # our own words, not every library's
            logging.getLogger().setLevel(logging.WARNING)
            logging.getLogger("inferscale").setLevel(logging.DEBUG)
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            with suppress(BrokenPipeError):
                sys.stdout.flush()
            raise
        except KeyboardInterrupt:
            _say("interrupted", debug=False)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:  # the reader has what it wanted (`| head`)
            _silence_stdout()
            ctx.exit(0)
        except Exception as error:
            _report(ctx, error, debug)
        return result


def _report(ctx: click.Context, error: Exception, debug: bool) -> None:
    """One line on stderr, the JSON form on stdout if that was asked for, and the exit code."""
    known = isinstance(error, InferScaleError)
    code = next((code for kind, code in _CODES if isinstance(error, kind)), NO) if known else BUG
    text = " ".join(str(error).split())
    if not known:
        text = f"unexpected {type(error).__name__}: {text} (set INFERSCALE_DEBUG=1 for the traceback and report it)"
    if ctx.meta.get(_JSON):
        with suppress(BrokenPipeError):
            print_json({"error": {"type": type(error).__name__, "message": text}})
            sys.stdout.flush()
    _say(text, debug)
    ctx.exit(code)


def _say(text: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    with suppress(OSError):
        click.echo(f"inferscale: {text}", err=True)


def _silence_stdout() -> None:
    """Let the interpreter's last flush go nowhere, or it would complain on stderr."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
