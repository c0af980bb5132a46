"""The `inferscale` command. Nothing here imports torch before a command needs a model: `--help` is instant."""

from __future__ import annotations

import click

from inferscale import __version__
from inferscale.cli.chat import chat
from inferscale.cli.guard import EXIT_CODES, GuardedGroup
from inferscale.cli.memories import add, encode, forget, list_memories, search
from inferscale.cli.serve import serve
from inferscale.cli.tools import bench, demo, doctor, models

EPILOG = f"""\b
Start here:
  inferscale demo                          see it work, in about a minute
  inferscale add "Rex is a collie."        remember something
  inferscale chat "Which breed is Rex?"    ask

\b
{EXIT_CODES}

INFERSCALE_HOME moves models and memories (default ~/.inferscale). INFERSCALE_DEBUG=1 shows the
traceback behind an error.
"""


@click.group(
    cls=GuardedGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="inferscale")
def main() -> None:
    """Memory for LLMs as precomputed KV: facts are encoded once and placed into the model's cache."""


for command in (demo, chat, add, search, list_memories, forget, encode, serve, bench, models, doctor):
    main.add_command(command)
