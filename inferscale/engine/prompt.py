"""How a prompt is laid out: header · facts · conversation, as token ranges and never as string searches.

The chat template is rendered once with unique placeholders where content goes; the template's own
text between them is tokenised with its control tokens, the content without: text that looks like
`<|im_end|>` inside a memory, a message or a system prompt stays text.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inferscale.core import digest
from inferscale.errors import InferScaleError, InvalidInput, UnsupportedModel

INSTRUCTION = (
    "You are a helpful assistant that remembers details from past conversations. "
    "Answer the question using the memories below in a few words.\nMemories:\n"
)
ROLES = ("system", "user", "assistant")

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the running conversation."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidInput(f"Message role must be one of {', '.join(ROLES)}, got {self.role!r}.")
        if not isinstance(self.content, str):
            raise InvalidInput(f"Message content must be a string, got {type(self.content).__name__}.")


class PromptFormat:
    """Lays out prompts for one tokenizer and one instruction.

    `header_ids` is the default header, which opens every prompt of a conversation without a system
    prompt; `digest` names the tokenizer's vocabulary for the recipe.
    """

    def __init__(self, tokenizer: Any, instruction: str = INSTRUCTION) -> None:
        self.tokenizer = tokenizer
        self.instruction = instruction
        self._lock = threading.Lock()  # whether control tokens count is a flag inside the shared tokenizer
        self._opens_user_turn = False
        probe = [Message("user", "x")]
        try:
            self.layout(probe)
        except InferScaleError:  # it knows no system role
            self._opens_user_turn = True
        self.header_ids: TokenIds = self.layout(probe)[0]
        if not self.header_ids:
            raise UnsupportedModel("The model's chat template puts nothing before the memories; a header is needed.")
        self.digest: str = digest(sorted(tokenizer.get_vocab().items()))

    def fact_ids(self, line: str) -> TokenIds:
        """Token ids of a fact's served line, the same wherever it stands."""
        return self._plain(line)

    def layout(self, messages: Sequence[Message]) -> tuple[TokenIds, TokenIds]:
        """Header and tail of a prompt that answers from memories; the memories' tokens go between.

        The header is the template's opening, the leading system messages joined by a blank line, if
        there are any, and the instruction; the tail is the rest of the conversation and the opening
        of the answer. Raises InvalidInput if the last message is not the user's, or if the template
        refuses the conversation.
        """
        system, turns = _parted(messages)
        held: dict[str, str] = {}
        before = f"{_hold(held, system)}\n\n" if system else ""
        memories = _hold(held, "")
        pieces = self._render(before + self.instruction + memories, turns, held)
        cut = 1 + list(held).index(memories)
        return self._tokens(pieces[:cut]), self._tokens(pieces[cut:])

    def plain_ids(self, messages: Sequence[Message]) -> TokenIds:
        """The conversation as the chat template renders it, without instruction and memories; raises as `layout`."""
        system, turns = _parted(messages)
        held: dict[str, str] = {}
        opening = _hold(held, system) if system else ""
        return self._tokens(self._render(opening, turns, held))

    def completion(self, prompt: str) -> tuple[TokenIds, TokenIds]:
        """Header and tail of a text that is continued from memories; the memories' tokens go between.

        The default header opens the list of memories; a blank line ends it, and `prompt` follows at
        once. No turn is closed or opened: the whole is one text, and what the model adds continues `prompt`.
        """
        return self.header_ids, (*self._special("\n"), *self._plain(prompt))

    def raw_ids(self, prompt: str) -> TokenIds:
        """The tokens of `prompt` alone, behind the BOS token if the tokenizer puts one before a text.

        Raises InvalidInput if that is nothing: some tokenizers drop characters that they do not know.
        """
        with self._lock:
            added = self.tokenizer("", add_special_tokens=True)["input_ids"]
        bos = self.tokenizer.bos_token_id
        ids = (*(token for token in added if token == bos), *self._plain(prompt))
        if not ids:
            raise InvalidInput("The model's tokenizer knows no character of this prompt; pass another text.")
        return ids

    def _render(self, opening: str, turns: Sequence[Message], held: dict[str, str]) -> list[tuple[str, str]]:
        """The rendered conversation as pairs: text of the template's or ours, and the held content that follows it."""
        conversation = [{"role": turn.role, "content": _hold(held, turn.content)} for turn in turns]
        if opening and self._opens_user_turn:
            conversation[0]["content"] = f"{opening}\n{conversation[0]['content']}"
        elif opening:
            conversation.insert(0, {"role": "system", "content": opening})
        text = self._template(conversation)
        pieces = []
        for mark, content in held.items():
            literal, text = _split(text, mark)
            pieces.append((literal, content))
        return [*pieces, (text, "")]

    def _tokens(self, pieces: Sequence[tuple[str, str]]) -> TokenIds:
        return tuple(t for literal, content in pieces for t in (*self._special(literal), *self._plain(content)))

    def _template(self, conversation: list[dict[str, str]]) -> str:
        if self.tokenizer.chat_template is None:
            lines = [f"{m['role'].capitalize()}: {m['content']}\n" for m in conversation]
            return (self.tokenizer.bos_token or "") + "".join(lines) + "Assistant:"
        try:
            rendered = self.tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=True,
                date_string="26 Jul 2024",  # some templates print today's date: the header's KV would change every day
                enable_thinking=False,
            )
        except Exception as error:  # templates raise what they like
            raise InvalidInput(
                f"The model's chat template refuses this conversation ({error}); send roles in an order that it knows."
            ) from error
        return str(rendered)

    def _special(self, text: str) -> TokenIds:
        return self._ids(text, split_special_tokens=False)

    def _plain(self, text: str) -> TokenIds:
        return self._ids(text, split_special_tokens=True)

    def _ids(self, text: str, *, split_special_tokens: bool) -> TokenIds:
        if not text:
            return ()
        with self._lock:
            found = self.tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens)
        return tuple(found["input_ids"])


def _parted(messages: Sequence[Message]) -> tuple[str, Sequence[Message]]:
    """The leading system messages as one text, and the messages after them."""
    if not messages or messages[-1].role != "user":
        raise InvalidInput("The conversation must end with a user message.")
    first = next(i for i, message in enumerate(messages) if message.role != "system")
    return "\n\n".join(message.content for message in messages[:first] if message.content), messages[first:]


def _hold(held: dict[str, str], content: str) -> str:
    """A placeholder for `content`, noted in `held`."""
    mark = f"@{secrets.token_hex(8)}@"
    held[mark] = content
    return mark


def _split(text: str, mark: str) -> tuple[str, str]:
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise UnsupportedModel("The model's chat template does not render each message exactly once.")
    return before, after
