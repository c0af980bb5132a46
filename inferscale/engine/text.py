"""From token ids to the pieces of text a caller sees: whole characters only, stop strings cut off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Turns one answer's tokens into text. `push` returns what is safe to show; `flush` the held-back rest."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that this token completes; "" while a character or a possible stop string is unfinished."""
        self._held += self._stream.step(self._backend, token_id) or ""
        at = min((i for s in self._stop if (i := self._held.find(s)) >= 0), default=-1)
        if at >= 0:
            self.stopped = True
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """The rest, once no more tokens come."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
