"""From 16-byte page keys to row numbers: open addressing with linear probing, in numpy; many keys per change.

Keys are digests, so their low word is the hash. Rows are numbers below `rows`; whose rows they are, and how a chain of
keys is followed without asking the table for each of them, is the trie's business. Deleting leaves a mark in the table
only where a later entry of the same run needs it, so tables that live long do not clog.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshkit.pages import KEY_BYTES

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

EMPTY = -1
GONE = -2  # deleted, but entries behind it are still to be found


def key_columns(keys: Sequence[bytes]) -> I64:
    """Keys as int64 words [n, 2]: made once per request, used for every pool. ValueError for keys of other length."""
    column = b"".join(keys)
    if len(column) != KEY_BYTES * len(keys):
        raise ValueError(f"keys: every page key has {KEY_BYTES} bytes; compute them with meshkit.pages.page_keys")
    return np.frombuffer(column, "<i8").reshape(-1, 2)


def key_bytes(columns: I64) -> list[bytes]:
    """The inverse of `key_columns`."""
    column = columns.astype("<i8").tobytes()
    return [column[i : i + KEY_BYTES] for i in range(0, len(column), KEY_BYTES)]


class KeyMap:
    """The keys of rows 0..rows-1 and a table of at least twice as many places."""

    __slots__ = ("_mask", "_table_view", "gone", "table", "used", "words", "words_view")

    def __init__(self, rows: int) -> None:
        size = 1 << max(4, (2 * rows - 1).bit_length())
        self._mask = size - 1
        self.table = np.full(size, EMPTY, np.int32)
        self.words = np.zeros((rows + 2, 2), np.int64)  # EMPTY and GONE index the two spare rows at the end
        self.used = 0
        self.gone = 0
        self._table_view = self.table.data
        self.words_view = self.words.data

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.words.nbytes

    def find(self, low: int, high: int) -> int:
        """Row of one key, -1 if there is none."""
        table, words, mask = self._table_view, self.words_view, self._mask
        at = low & mask
        while True:
            row = table[at]
            if row == EMPTY:
                return -1
            if row >= 0 and words[row, 0] == low and words[row, 1] == high:
                return row
            at = (at + 1) & mask

    def insert(self, rows: I32, columns: I64) -> None:
        """Add distinct keys that are not there yet."""
        self.words[rows] = columns
        self.used += len(rows)
        places = columns[:, 0] & self._mask
        while len(rows):
            there = self.table[places]
            free = np.flatnonzero(there < 0)
            self.table[places[free]] = rows[free]
            won = np.zeros(len(rows), np.bool_)
            won[free] = self.table[places[free]] == rows[free]
            if self.gone:
                self.gone -= int(np.count_nonzero(there[won] == GONE))
            rows, places = rows[~won], (places[~won] + 1) & self._mask

    def insert_one(self, row: int, low: int, high: int) -> None:
        """Add one key that is not there yet."""
        table, mask = self._table_view, self._mask
        self.words_view[row, 0], self.words_view[row, 1] = low, high
        at = low & mask
        while table[at] >= 0:
            at = (at + 1) & mask
        self.gone -= table[at] == GONE
        self.used += 1
        table[at] = row

    def delete(self, rows: I32) -> None:
        """Remove the keys of these rows, which must be there."""
        table, mask = self.table, self._mask
        places = self.words[rows, 0] & mask
        pending = np.flatnonzero(table[places] != rows)
        while len(pending):
            places[pending] = at = (places[pending] + 1) & mask
            assert not (table[at] == EMPTY).any(), "a row to delete is not in the table"
            pending = pending[table[at] != rows[pending]]
        table[places] = GONE
        self.words[rows] = 0
        self.used -= len(rows)
        self.gone += len(rows)
        while len(places):  # a mark before an empty place serves nobody
            places = places[table[(places + 1) & mask] == EMPTY]
            table[places] = EMPTY
            self.gone -= len(places)
            places = (places - 1) & mask
            places = places[table[places] == GONE]
        if self.gone > (mask + 1) >> 2:
            self._rehash()

    def check(self, rows: I32 | I64) -> None:
        """AssertionError unless exactly these rows have a key, and every key is found."""
        at = np.flatnonzero(self.table >= 0)
        there = self.table[at]
        assert self.used == len(at) and (np.sort(there) == np.sort(rows)).all(), "the key map and the rows differ"
        assert self.gone == np.count_nonzero(self.table == GONE), "the count of marks is off"
        home = self.words[there, 0] & self._mask
        empty = np.cumsum(self.table == EMPTY)  # up to and with each place
        between = np.where(home <= at, empty[at] - empty[home], empty[at] + empty[-1] - empty[home])
        assert not between.any() and (self.table[home] != EMPTY).all(), "a key does not lead to its row"

    def _rehash(self) -> None:
        rows = self.table[self.table >= 0]
        self.table.fill(EMPTY)
        self.used = self.gone = 0
        self.insert(rows, self.words[rows])
