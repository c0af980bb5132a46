"""Find what SQLite's `secure_delete` misses: copies of rows that moved between pages.

`secure_delete` overwrites a row where it lies when it is deleted. But when SQLite balances its trees it
moves rows to other pages and leaves their old bytes in the gap of the page they came from; those outlive
the row. VACUUM rewrites every page and clears them. It costs about 8 ms per MB, so a deletion first
looks whether any gap is not empty (1 ms per MB).

Page layout: https://www.sqlite.org/fileformat2.html#b_tree_pages
"""

from __future__ import annotations

PAGE_BYTES = 4096
_LEAF_TABLE = 13  # the page type that holds rows; interior and index pages hold ids and digests (see schema)
_HEADER_BYTES = 8
_POINTER_LIMIT = PAGE_BYTES >> 8  # the high byte of every cell pointer is below this


def has_residue(database: bytes) -> bool:
    """True if a gap between a page's cell pointers and its cells holds bytes of moved rows.

    `database` is a whole database of PAGE_BYTES pages, as `sqlite3.Connection.serialize` returns it. An
    overflow page whose text happens to look like a page header can only cause a needless VACUUM.
    """
    starts = range(PAGE_BYTES, len(database), PAGE_BYTES)  # the first page holds the schema alone
    return any(_gap_is_used(database, start) for start in starts)


def _gap_is_used(database: bytes, page: int) -> bool:
    if database[page] != _LEAF_TABLE:
        return False
    cells = int.from_bytes(database[page + 3 : page + 5], "big")
    content = int.from_bytes(database[page + 5 : page + 7], "big")
    gap = database[page + _HEADER_BYTES + 2 * cells : page + content]
    # Old cell pointers stay behind too, VACUUM or not. They say nothing, and every other byte of them is small.
    return max(gap[::2], default=0) >= _POINTER_LIMIT
