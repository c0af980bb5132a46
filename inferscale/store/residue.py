"""Find what SQLite's `secure_delete` misses: copies of rows that moved between pages.

`secure_delete` overwrites a row where it lies when it is deleted. But when SQLite balances its trees it
moves rows to other pages and leaves their old bytes in the gap of the page they came from; those outlive
the row. VACUUM rewrites every page and clears them. It costs about 8 ms per MB, so a deletion first
looks whether any gap is not empty (1 ms per MB).

Page layout: https://www.sqlite.org/fileformat2.html#b_tree_pages
"""

from __future__ import annotations

_HEADER_BYTES = {2: 12, 5: 12, 10: 8, 13: 8}  # by page type: interior index, interior table, leaf index, leaf table


def has_residue(database: bytes) -> bool:
    """True if a gap between a page's cell pointers and its cells holds anything but zeros.

    `database` is a whole database as `sqlite3.Connection.serialize` returns it. An overflow page whose
    text happens to look like such a page can only cause a needless VACUUM.
    """
    page_bytes = int.from_bytes(database[16:18], "big")
    if page_bytes == 1:  # how the format writes 65,536
        page_bytes = 65_536
    # The first page holds the schema alone.
    starts = range(page_bytes, len(database), page_bytes)
    return any(_gap_is_used(database, start, page_bytes) for start in starts)


def _gap_is_used(database: bytes, page: int, page_bytes: int) -> bool:
    header = _HEADER_BYTES.get(database[page])
    if header is None:
        return False
    cells = int.from_bytes(database[page + 3 : page + 5], "big")
    content = int.from_bytes(database[page + 5 : page + 7], "big") or 65_536
    gap = database[page + header + 2 * cells : page + min(content, page_bytes)]
    return gap.count(0) != len(gap)
