"""Where sentences end, in any script, in one pass over the text.

Nothing is ever lost: the spans cover every character that is not whitespace. A wrong guess costs a
sentence that is cut in two or two that stay together, no more.
"""

from __future__ import annotations

import re
import unicodedata

Span = tuple[int, int]
"""[start, end) of a text, in characters."""

WIDE_MARKS = "。！？｡"  # noqa: RUF001
"""End a sentence wherever they stand; their scripts put no space behind them."""
MARKS = ".!?…؟۔।॥։።‽⁇⁈⁉"  # noqa: RUF001
"""End a sentence when whitespace follows, so decimals, URLs and file names stay whole."""
CLOSERS = "\"')]}»”’›」』）】》"  # noqa: RUF001
"""Belong to the sentence whose mark they follow."""

_ABBREVIATION = re.compile(
    r"mrs?|ms|dr|prof|rev|sr|jr|st|mt|vs|e\.g|i\.e|cf|al|ca|approx|dept|est|inc|ltd|corp|vol|pp"
    r"|jan|feb|apr|jun|jul|aug|sept?|oct|nov|dec|tues?|thurs?|gen|col|sgt|capt|lt|gov|sen|ave|blvd|rd"
    r"|u\.s|u\.k|u\.n|ph\.d|[bm]\.a|bzw|usw|z\.b|d\.h",
    re.IGNORECASE,
)
"""Words before a full stop that does not end the sentence; those that end one as often are not here."""

_ENDS = re.compile(rf"[{re.escape(WIDE_MARKS)}]+|[{re.escape(MARKS)}]+|[\n\r\u2028\u2029]")
_LAST_WORD = re.compile(r"[^\s(\[\"'“‘«]+$")  # noqa: RUF001
_LOOK_BACK = 24
"""Characters; longer than any abbreviation."""


def sentences(text: str) -> list[Span]:
    """Spans of the sentences of `text`, in order, trimmed; a line break always ends one."""
    spans: list[Span] = []
    start = 0
    for mark in _ENDS.finditer(text):
        if mark.start() < start:  # swallowed as a closer or an emoji of the sentence before
            continue
        end = _sentence_end(text, mark)
        if end is not None:
            _append(spans, text, start, end)
            start = end
    _append(spans, text, start, len(text))
    return spans


def _append(spans: list[Span], text: str, start: int, end: int) -> None:
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    if start < end:
        spans.append((start, end))


def _sentence_end(text: str, mark: re.Match[str]) -> int | None:
    """The end of the sentence that this mark ends (with its closers), or None."""
    end = mark.end()
    if mark[0].isspace():
        return end
    while end < len(text) and (text[end] in CLOSERS or _joins(text[end])):
        end += 1
    if mark[0][0] in WIDE_MARKS:
        return _with_emoji(text, end)
    if end < len(text) and not text[end].isspace():
        # "Great!🎉 Next": an emoji may follow without a space; "3.5", "a.b" and "v2.x" go on
        return _with_emoji(text, end) if _pictorial(text[end]) else None
    if mark[0] == "." and end == mark.end() and _abbreviates(text, mark.start()):
        return None
    following = text[end : end + _LOOK_BACK].lstrip()
    if following and following[0].islower() and mark[0][0] in ".…":
        return None  # "approx. ten", "well... maybe"
    return _with_emoji(text, end)


def _abbreviates(text: str, stop: int) -> bool:
    """True if the word before the full stop at `stop` is an abbreviation, an initial or a list number."""
    found = _LAST_WORD.search(text[max(0, stop - _LOOK_BACK) : stop])
    if found is None:
        return False
    word = found[0]
    if len(word) == 1 and word.isalpha():
        return word.isupper() and word != "I"  # "J. Smith", but "so am I."
    if word.isdecimal() and len(word) <= 2:  # "2. Milk" in a list, but "I am 42."
        line = text[max(0, stop - _LOOK_BACK) : stop - len(word)].rpartition("\n")[2]
        return not line.strip()
    return _ABBREVIATION.fullmatch(word) is not None


def _with_emoji(text: str, end: int) -> int:
    """`end` moved behind emoji that follow, with or without a space: they comment on the sentence."""
    place = end
    while place < len(text) and (text[place] in " \t" or _pictorial(text[place]) or _joins(text[place])):
        place += 1
        if not text[place - 1].isspace():
            end = place
    return end


def _pictorial(char: str) -> bool:
    return char > "\u2190" and unicodedata.category(char) in ("So", "Sk")


def _joins(char: str) -> bool:
    """Zero-width joiners, variation selectors, combining marks: never the first of a piece."""
    return char > "\u02ff" and (char == "\u200d" or unicodedata.category(char) in ("Mn", "Me", "Mc"))


def split_long(text: str, span: Span, limit: int) -> list[Span]:
    """`span` in pieces of at most `limit` characters, cut at whitespace where there is any, never before a joiner."""
    pieces: list[Span] = []
    start, end = span
    while end - start > limit:
        cut = start + limit
        space = next((i for i in range(cut, start + limit // 2, -1) if text[i].isspace()), None)
        if space is not None:
            cut = space
        else:
            whole = cut
            while whole > start + 1 and (_joins(text[whole]) or text[whole - 1] == "\u200d"):
                whole -= 1
            cut = whole if whole > start + 1 else cut  # a "character" longer than the limit is cut all the same
        _append(pieces, text, start, cut)
        start = cut
        while start < end and text[start].isspace():
            start += 1
    _append(pieces, text, start, end)
    return pieces


def pack(spans: list[Span], groups: int, limit: int) -> list[Span]:
    """Neighbours joined into at most `groups` spans of even length, or more where `limit` would be exceeded.

    Each span must fit `limit` (in characters, counting what lies between joined neighbours).
    """
    if len(spans) <= groups:
        return spans
    low, high = max(end - start for start, end in spans), spans[-1][1] - spans[0][0]
    while low < high:  # the least length that needs no more than `groups`
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(spans, middle)) <= groups else (middle + 1, high)
    return _fill(spans, min(low, limit))


def _fill(spans: list[Span], limit: int) -> list[Span]:
    filled = [spans[0]]
    for start, end in spans[1:]:
        if end - filled[-1][0] <= limit:
            filled[-1] = (filled[-1][0], end)
        else:
            filled.append((start, end))
    return filled
