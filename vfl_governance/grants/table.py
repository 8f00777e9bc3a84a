"""Computes keyed digests of a party's table for its grants.

The key never leaves the party. Without a key, a peer that has the grant could guess ids or names of
columns and compare the digests.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

from vfl_party.assembly.party import OpenedParty
from vfl_party.data import Table


def digests(opened: OpenedParty, secret: bytes) -> tuple[str, str]:
    """Returns the hexadecimal digests of the columns and of the ids of a party's table.

    The first digest includes the names and kinds of the columns, the shape of images, and whether
    there are labels. The second includes the ids of all rows, also of rows that only this party
    has.
    """
    tables = [cell for cell in (opened.table, opened.unaligned) if cell is not None]
    columns = (word for table in tables for word in _describe_columns(table))
    ids = (cell for table in tables for cell in ("", *table.ids))
    return _digest(secret, b"columns", columns), _digest(secret, b"ids", ids)


def _describe_columns(table: Table) -> Iterable[str]:
    yield "table"
    yield from (f"number {name}" for name in table.numeric_names)
    yield from (f"category {name}" for name in table.categorical_names)
    if table.images_NCHW is not None:
        yield f"images {list(table.images_NCHW.shape[1:])}"
    if table.labels is not None:
        yield "labels"


def _digest(secret: bytes, what: bytes, words: Iterable[str]) -> str:
    digest = hmac.new(secret, what, sha256)
    for word in words:
        data = word.encode("utf-8", "surrogatepass")
        # The length before each text ensures that two different lists have different bytes.
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()
