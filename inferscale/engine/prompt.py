"""How a prompt is laid out: header · facts · conversation, as token ranges and never as string searches.

The chat template is rendered once with unique placeholders where content goes; the template's own
text between them is tokenised with its control tokens, the content without: text that looks like
`<|im_end|>` inside a memory or a message stays text.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inferscale.core import digest
from inferscale.errors import InvalidInput, UnsupportedModel

INSTRUCTION = (
    "You are a helpful assistant that remembers details from past conversations. "
    "Answer the question using the memories below in a few words.\nMemories:\n"
)
ROLES = ("system", "user", "assistant")


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

    `header_ids` open every prompt; `digest` names the tokenizer's vocabulary for the recipe.
    """

    def __init__(self, tokenizer: Any, instruction: str = INSTRUCTION) -> None:
        self.tokenizer = tokenizer
        self.instruction = instruction
        self._lock = threading.Lock()  # whether control tokens count is a flag inside the shared tokenizer
        self._memories_in_user_turn = False
        try:
            self._rendered([Message("user", "x")])
        except Exception:  # templates raise what they like when they know no system role
            self._memories_in_user_turn = True
        header, _ = self._rendered([Message("user", "x")])
        self.header_ids: tuple[int, ...] = self._special(header)
        if not self.header_ids:
            raise UnsupportedModel("The model's chat template puts nothing before the memories; a header is needed.")
        self.digest: str = digest(sorted(tokenizer.get_vocab().items()))

    def fact_ids(self, line: str) -> tuple[int, ...]:
        """Token ids of a fact's served line, the same wherever it stands."""
        return self._plain(line)

    def tail_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Everything behind the memories: the conversation and the opening of the answer."""
        if not messages or messages[-1].role != "user":
            raise InvalidInput("The conversation must end with a user message.")
        return self._rendered(messages)[1]

    def _rendered(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """The template's text before the memories, and the token ids after them."""
        mark = f"@{secrets.token_hex(8)}@"
        marks = [f"{mark}{i}@" for i in range(len(messages))]
        conversation = [{"role": m.role, "content": marks[i]} for i, m in enumerate(messages)]
        opening = f"{self.instruction}{mark}@"
        if self._memories_in_user_turn:
            conversation[0]["content"] = f"{opening}\n{conversation[0]['content']}"
        else:
            conversation.insert(0, {"role": "system", "content": opening})
        text = self._template(conversation)
        ids: list[int] = []
        header, text = _split(text, f"{mark}@")
        for message, here in zip(messages, marks, strict=True):
            literal, text = _split(text, here)
            ids += self._special(literal)
            ids += self._plain(message.content)
        return header, (*ids, *self._special(text))

    def _template(self, conversation: list[dict[str, str]]) -> str:
        if self.tokenizer.chat_template is None:
            lines = [f"{m['role'].capitalize()}: {m['content']}\n" for m in conversation]
            return (self.tokenizer.bos_token or "") + "".join(lines) + "Assistant:"
        rendered = self.tokenizer.apply_chat_template(
            conversation,
            tokenize=False,
            add_generation_prompt=True,
            date_string="26 Jul 2024",  # some templates print today's date: the header's KV would change every day
            enable_thinking=False,
        )
        return str(rendered)

    def _special(self, text: str) -> tuple[int, ...]:
        return self._ids(text, split_special_tokens=False)

    def _plain(self, text: str) -> tuple[int, ...]:
        return self._ids(text, split_special_tokens=True)

    def _ids(self, text: str, *, split_special_tokens: bool) -> tuple[int, ...]:
        if not text:
            return ()
        with self._lock:
            found = self.tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens)
        return tuple(found["input_ids"])


def _split(text: str, mark: str) -> tuple[str, str]:
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise UnsupportedModel("The model's chat template does not render each message exactly once.")
    return before, after
