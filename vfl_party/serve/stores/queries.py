"""What the queries of all databases have in common that are asked for rows by id."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from vfl_common.errors import InputError
from vfl_common.passwords import hide_passwords
from vfl_party.data import checks

# Does not match a PostgreSQL cast such as x::ids.
_IDS = re.compile(r"(?<![:\w\\]):ids\b")
# Row limit per id, for data.duplicates = "first", plus a constant so that few ids may have many.
_ROWS_OF_ONE, _MORE_ROWS = 16, 1024


def with_ids(query: str, mark: str, source: str) -> str:
    """Returns a query with ``mark`` in place of ``:ids``. Raises InputError if it has none."""
    if not _IDS.search(query):
        raise checks.unusable(
            hide_passwords(source),
            "data.query has no :ids. Add a condition, for example WHERE id IN :ids, or in "
            "PostgreSQL WHERE id = ANY(:ids).",
        )
    return _IDS.sub(lambda _: mark, query)


def row_limit(ids: int) -> int:
    """Returns how many rows a query may give for so many ids."""
    return _ROWS_OF_ONE * ids + _MORE_ROWS


def too_many(source: str, ids: int, max_rows: int) -> InputError:
    """Returns the error for a query that gives more rows than it may."""
    number = "one id" if ids == 1 else f"{ids:,} ids"
    return checks.unusable(
        source,
        f"data.query returns more than {max_rows:,} rows for {number}. Correct its :ids condition.",
    )


@contextlib.contextmanager
def name_keys() -> Iterator[None]:
    """Names the keys of ``serve.store`` in sentences about the query."""
    try:
        yield
    except InputError as error:
        text = str(error).replace("data.query", "serve.store.query")
        raise error.privately(text.replace("data.source", "serve.store.source")) from None
