"""`inferscale chat`: one question, or a conversation."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from inferscale.cli.memories import count, row
from inferscale.cli.session import Session, memory_options, sampling, shown
from inferscale.errors import InferScaleError, PromptTooLong

if TYPE_CHECKING:
    from inferscale.answer import Reply
    from inferscale.memory import Memory

HELP = "/memories shows what the last answer was given from, /quit (or Ctrl-D) ends"
REMEMBER_WAIT = 30.0
"""Seconds that the end of a chat waits for the KV of what was said; what is missing is made next time."""


@click.command(short_help="Ask one question, or talk.")
@click.argument("question", nargs=-1)
@click.option(
    "--mode",
    type=click.Choice(["inject", "text", "off"]),
    default="inject",
    show_default=True,
    help="Place the memories' KV, prefill the same memories as text, or use none.",
)
@click.option("-k", "--top-k", type=click.IntRange(0), help="Most memories in the prompt. Default: 20.")
@click.option("--hot", type=click.IntRange(0), help="Best memories left as text behind the injected ones. Default: 0.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Longest answer.")
@click.option("--remember", is_flag=True, help="Remember what you say, once it is answered.")
@memory_options
def chat(session: Session, question: tuple[str, ...], remember: bool, **options: Any) -> None:
    """Answer a QUESTION from the memories; without one, talk until /quit.

    \b
    Example:
      inferscale chat "Which breed is Rex?"
      inferscale chat --remember
    """
    if session.out.json and not question:
        raise click.UsageError("--json needs a QUESTION.")
    with session.memory() as memory:
        talk = Talk(memory, session, remember, options)
        if question:
            reply = talk.ask(" ".join(question))
            session.out.result(asdict(reply))
        else:
            _interact(talk, session)
        if remember:
            memory.flush(REMEMBER_WAIT)
            session.out.note(f"{count(talk.remembered)} added for {session.whose}")


class Talk:
    """A running conversation: asks, prints, keeps the history."""

    def __init__(self, memory: Memory, session: Session, remember: bool, options: dict[str, Any]) -> None:
        self.remembered = 0
        self.last: Reply | None = None
        self._memory = memory
        self._session = session
        self._remember = remember
        self._history: list[dict[str, str]] = []
        self._sampling = sampling(options.pop("max_tokens"))
        self._options = options

    def ask(self, question: str) -> Reply:
        """Print the answer as it comes; what was said before goes along as far as the context holds it."""
        out = self._session.out
        messages = [*self._history, {"role": "user", "content": question}]
        while True:
            try:
                stream = self._memory.stream(messages, sampling=self._sampling, **self._options, **self._session.owners)
                break
            except PromptTooLong:
                if len(messages) < 3:
                    raise
                messages = messages[2:]
                out.note("(the oldest messages no longer fit and are left out)")
        for piece in stream:
            if not out.json:
                click.echo(shown(piece), nl=False)
        out.line("")
        self.last = reply = stream.reply
        self._history = [*messages, {"role": "assistant", "content": reply.text or "…"}]
        out.note(_summary(reply))
        if self._remember:
            added = self._memory.add(question, **self._session.owners)["results"]
            self.remembered += sum(result["event"] == "ADD" for result in added)
        return reply


def _summary(reply: Reply) -> str:
    """How the answer came about, in one line."""
    parts = [count(len(reply.memories))]
    if reply.mode == "inject":
        parts.append(f"{reply.injected_tokens} of {reply.prompt_tokens} prompt tokens injected")
        if reply.text_memories:
            parts.append(f"{reply.text_memories} of the memories as text")
        if reply.fallback:
            parts.append(f"not injected: {reply.fallback}")
    else:
        parts.append(f"{reply.prompt_tokens} prompt tokens prefilled")
    parts.append(f"first token after {reply.timings['first_token'] * 1e3:,.0f} ms")
    return "[" + " · ".join(parts) + "]"


def _interact(talk: Talk, session: Session) -> None:
    """Read questions until /quit or the end of the input. Ctrl-C stops an answer; at the prompt, it ends all."""
    with suppress(ImportError):  # not on every system; it only makes line editing better
        import readline  # noqa: F401
    session.out.note(f"Ask away: {HELP}.")
    while (line := _prompt()) is not None:
        text = line.strip()
        if text in ("/quit", "/exit"):
            return
        if text == "/memories":
            _show_memories(talk, session)
        elif text.startswith("/"):
            session.out.note(f"{shown(text)}? {HELP}.")
        elif text:
            _answer(talk, session, text)


def _prompt() -> str | None:
    """One line from the user; None at the end of the input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    try:
        return input("\n> ")
    except EOFError:
        click.echo()
        return None


def _answer(talk: Talk, session: Session, text: str) -> None:
    try:
        talk.ask(text)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        session.out.note("\n(stopped)")
    except InferScaleError as error:  # a refused question does not end the conversation
        click.echo(f"inferscale: {error}", err=True)


def _show_memories(talk: Talk, session: Session) -> None:
    if talk.last is None or not talk.last.memories:
        session.out.note("no memories were used yet" if talk.last is None else "no memories were found")
        return
    for item in reversed(talk.last.memories):
        click.echo(f"{item['score']:5.2f}  {row(item)}")
