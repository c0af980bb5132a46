"""Commands that keep, find and forget memories."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inferscale.cli.guard import NO
from inferscale.cli.session import Session, memory_options, shown
from inferscale.core import clean_text, one_line
from inferscale.errors import MemoryNotFound

if TYPE_CHECKING:
    from inferscale.core import Turn
    from inferscale.facts.locomo import LocomoConversation
    from inferscale.memory import Memory
    from inferscale.upkeep import Progress

BATCH = 64
"""Messages handed over at once: an interrupted load keeps what it has, and the next one skips that."""


def row(item: Mapping[str, Any]) -> str:
    """A memory on one line, its id first."""
    time_shown = f"  ({shown(one_line(item['time']))})" if item.get("time") else ""
    return f"{item['id']}  {shown(one_line(item['memory']))}{time_shown}"


def count(number: int) -> str:
    """ "1 memory", "2 memories"."""
    return f"{number:,} memor{'y' if number == 1 else 'ies'}"


@click.command(short_help="Remember texts, or a conversation from a file.")
@click.argument("texts", metavar="[TEXT...|-]", nargs=-1)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='A conversation: a JSON list of {"role", "content"} messages, or LoCoMo\'s shape.',
)
@click.option(
    "--extract",
    type=click.Choice(["auto", "verbatim", "none"]),
    default="auto",
    show_default=True,
    help="How messages become memories: their sentences with the speaker's name (verbatim), each message as "
    "it is (none), or the observations that a LoCoMo file brings along, else verbatim (auto).",
)
@click.option("--speaker", default="user", show_default=True, help="Who said the TEXTs.")
@click.option("--time", "when", metavar="TEXT", help='When it was said, as it shall be shown: "8 May 2023".')
@click.option("--no-wait", is_flag=True, help="Return when the texts are safe; their KV is made by a later command.")
@memory_options
def add(
    session: Session,
    texts: tuple[str, ...],
    file: Path | None,
    extract: str,
    speaker: str,
    when: str | None,
    no_wait: bool,
) -> None:
    """Remember texts, the lines of stdin (-), or a conversation from a file.

    What is already known is not added twice, so an interrupted load can simply be run again.

    \b
    Example:
      inferscale add "Rex is a collie." --time "8 May 2023"
      inferscale add --file conversation.json --user alice
    """
    if bool(texts) == bool(file):
        raise click.UsageError("Pass texts, - for stdin, or --file.")
    messages, conversations = _read(file) if file else (_spoken(_lines(texts), speaker), [])
    with session.memory() as memory:
        results: list[dict[str, Any]] = []
        for batch in _batches(memory, session, messages, conversations, extract, when):
            results += batch
            for result in batch:
                mark = "+" if result["event"] == "ADD" else "="
                session.out.line(f"{mark} {row(result)}")
        began = time.monotonic()
        progress = None if no_wait else session.out.wait(memory)
        added = sum(result["event"] == "ADD" for result in results)
        known = f", {len(results) - added} known already" if added < len(results) else ""
        made = f"; KV made in {time.monotonic() - began:.1f} s" if progress and progress.encoded else ""
        session.out.note(f"{count(added)} added for {session.whose}{known}{made}")
        session.out.result({"results": results, **_state(progress)})
        _end(progress)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """The texts, with stdin's lines in the place of "-"; blank lines of stdin are skipped."""
    for text in texts:
        if text == "-":
            lines = (line.decode("utf-8", "surrogateescape") for line in sys.stdin.buffer)
            yield from (line for line in lines if line.strip())
        else:
            yield text


def _spoken(texts: Iterable[str], speaker: str) -> list[dict[str, Any]]:
    return [{"role": "user", "name": speaker, "content": clean_text(text)} for text in texts]


def _read(file: Path) -> tuple[list[dict[str, Any]], list[LocomoConversation]]:
    """A file's messages, or its conversations in LoCoMo's shape."""
    from inferscale.facts.locomo import load_locomo

    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        data = None  # the loader below says what is wrong
    if isinstance(data, list) and data and all(isinstance(item, dict) and "content" in item for item in data):
        return data, []
    return [], load_locomo(file)


def _batches(
    memory: Memory,
    session: Session,
    messages: list[dict[str, Any]],
    conversations: Sequence[LocomoConversation],
    extract: str,
    when: str | None,
) -> Iterator[list[dict[str, Any]]]:
    """Add batch by batch; yields each batch's results in the form of `Memory.add`."""
    for conversation in conversations:
        if extract == "auto" and conversation.facts:
            yield from _observations(memory, session, conversation)
        else:
            messages = [*messages, *map(_message, conversation.turns)]
    for at in range(0, len(messages), BATCH):
        batch = messages[at : at + BATCH]
        yield memory.add(batch, **session.owners, timestamp=when, infer=extract != "none")["results"]


def _message(turn: Turn) -> dict[str, Any]:
    return {"role": "user", "name": turn.speaker, "content": turn.text, "time": turn.time}


def _observations(memory: Memory, session: Session, conversation: LocomoConversation) -> Iterator[list[dict[str, Any]]]:
    """Add a LoCoMo conversation's own facts, those that the owner does not have yet."""
    turns = {turn.id: turn for turn in conversation.turns}
    known = {item["memory"]: item["id"] for item in memory.get_all(**session.owners)["results"]}
    for at in range(0, len(conversation.facts), BATCH):
        batch = [
            (turns.get(fact.turn_id), clean_text(fact.text).strip()) for fact in conversation.facts[at : at + BATCH]
        ]
        new = {text: turn for turn, text in batch if text not in known}
        ids = memory.add_facts([(turn, text) for text, turn in new.items()], session.scope)
        known.update(zip(new, ids, strict=True))
        yield [
            {"id": known[text], "memory": text, "event": "ADD" if new.pop(text, known) is not known else "NONE"}
            for _, text in batch
        ]


def _state(progress: Progress | None) -> dict[str, Any]:
    """What is encoded and what is not, for --json."""
    if progress is None:
        return {}
    return {"encoded": progress.encoded, "waiting": progress.waiting, "failed": dict(progress.failed)}


def _end(progress: Progress | None) -> None:
    """Exit 1 if some KV could not be made; the memories themselves are safe."""
    if progress and (progress.failed or progress.waiting):
        reason = next(iter(progress.failed.values()), "stopped early")
        click.echo(
            f"inferscale: {count(len(progress.failed) or progress.waiting)} could not be encoded and are served "
            f"as text ({shown(reason)}); `inferscale encode` tries again.",
            err=True,
        )
        sys.exit(NO)


@click.command(short_help="Find the memories nearest to a query.")
@click.argument("query", nargs=-1, required=True)
@click.option("-k", "--top-k", type=click.IntRange(1), default=10, show_default=True, help="Most memories to show.")
@click.option("--threshold", type=float, help="Least similarity (cosine, -1 to 1).")
@memory_options
def search(session: Session, query: tuple[str, ...], top_k: int, threshold: float | None) -> None:
    """Find the memories nearest to a query, best first: similarity, id, text.

    \b
    Example:
      inferscale search "Which breed is Rex?" --top-k 3
    """
    with session.memory() as memory:
        found = memory.search(" ".join(query), top_k=top_k, threshold=threshold, **session.owners)
    for item in found["results"]:
        session.out.line(f"{item['score']:5.2f}  {row(item)}")
    _found(session, found)


@click.command("list", short_help="Show every memory, oldest first.")
@click.option("-k", "--top-k", type=click.IntRange(1), help="Only the first ones.")
@memory_options
def list_memories(session: Session, top_k: int | None) -> None:
    """Show every memory, oldest first: id, text, time.

    \b
    Example:
      inferscale list --user alice
    """
    with session.memory() as memory:
        found = memory.get_all(top_k=top_k, **session.owners)
    for item in found["results"]:
        session.out.line(row(item))
    _found(session, found)


def _found(session: Session, found: Mapping[str, Any]) -> None:
    session.out.result(found)
    number = len(found["results"])
    session.out.note(f"{count(number)} of {session.whose}" if number else f"no memories of {session.whose}")
    if not number:
        sys.exit(NO)


@click.command(short_help="Forget memories for good.")
@click.argument("ids", metavar="[ID...]", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Forget everything of this owner.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@memory_options
def forget(session: Session, ids: tuple[str, ...], everything: bool, yes: bool) -> None:
    """Forget memories for good: text, embedding, KV and history.

    Prints how many were forgotten. An unknown id ends with exit code 1, and then nothing was forgotten.

    \b
    Example:
      inferscale forget 8bd4049d-985c-4c35-9cc9-7f8a6ba72352
      inferscale forget --all --user alice
    """
    if bool(ids) == everything:
        raise click.UsageError("Pass ids, or --all.")
    with session.memory() as memory:
        if everything:
            forgotten = _forget_all(memory, session, yes)
        else:
            for memory_id in dict.fromkeys(ids):
                _check_owner(memory, session, memory_id)
            for memory_id in dict.fromkeys(ids):
                memory.delete(memory_id)
            forgotten = len(set(ids))
    session.out.line(f"{count(forgotten)} forgotten")
    session.out.result({"forgotten": forgotten})
    if not forgotten:
        sys.exit(NO)


def _check_owner(memory: Memory, session: Session, memory_id: str) -> None:
    """Another owner's memory is as unknown here as it is to search and list."""
    item = memory.get(memory_id)
    if item is None or any(item.get(key) != value for key, value in session.owners.items()):
        raise MemoryNotFound(
            f"There is no memory {shown(memory_id)!r} of {session.whose}; `inferscale list` shows the ids that exist."
        )


def _forget_all(memory: Memory, session: Session, yes: bool) -> int:
    number = len(memory.get_all(**session.owners)["results"])
    question = f"Forget {count(number)} of {session.whose} for good?"
    if not number or not (yes or click.confirm(question, err=True)):
        return 0
    return int(memory.delete_all(**session.owners)["deleted"])


@click.command(short_help="Make the KV of every memory that has none.")
@click.option(
    "--reencode",
    is_flag=True,
    help="Adopt a store that another model made: its texts stay, embeddings and KV are made again.",
)
@memory_options
def encode(session: Session, reencode: bool) -> None:
    """Make the KV of every memory in the store that has none, whoever owns it.

    It may be interrupted at any time: the next run goes on where this one stopped.

    \b
    Example:
      inferscale encode
      inferscale encode --reencode --model ./another-model
    """
    began = time.monotonic()
    with session.memory(reencode=reencode) as memory:
        progress = session.out.wait(memory)
    seconds = time.monotonic() - began
    rate = f" in {seconds:.1f} s" if progress.encoded else ""
    session.out.line(f"{count(progress.encoded)} encoded{rate}, {progress.waiting} left")
    session.out.result(_state(progress))
    _end(progress)
