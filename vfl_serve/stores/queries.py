"""Functions for queries by id that all databases share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from vfl_common.errors import InputError
from vfl_common.text import hide_passwords
from vfl_party.data import checks

# Does not match a PostgreSQL cast such as x::ids.
_IDS = re.compile(r"(?<![:\w\\]):ids\b")
# Maximum rows per id (for data.duplicates = "first"), plus a constant for queries of few ids.
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
    """Returns the maximum number of rows that a query may return for so many ids."""
    return _ROWS_OF_ONE * ids + _MORE_ROWS


def too_many(source: str, ids: int, max_rows: int) -> InputError:
    """Returns the error for a query that returns more than ``max_rows`` rows."""
    number = "one id" if ids == 1 else f"{ids:,} ids"
    return checks.unusable(
        source,
        f"data.query returns more than {max_rows:,} rows for {number}. Correct its :ids condition.",
    )


@contextlib.contextmanager
def name_keys() -> Iterator[None]:
    """Replaces keys of ``data`` with those of ``serve.store`` in error messages."""
    try:
        yield
    except InputError as error:
        text = str(error).replace("data.query", "serve.store.query")
        raise error.privately(text.replace("data.source", "serve.store.source")) from None
