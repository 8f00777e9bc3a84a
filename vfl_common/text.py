"""Formats text and JSON for people and other programs, and removes passwords from URLs in it. Some
of the text comes from peers, which are not trusted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any
from urllib.parse import unquote_plus

from pydantic import AfterValidator, BeforeValidator

# The maximum number of names in a list for a person.
_MAX_NAMES = 8
# The maximum length of a name in a sentence.
_MAX_NAME_CHARS = 80
# The maximum length of a line for a person, and of a text in the log.
LINE = 2_000
# The kind of the phase that evaluates the trained model.
MEASURES = "evaluate"


def clean(text: str, max_chars: int = 500) -> str:
    """Returns a peer's text as one line of printable characters, so that the peer cannot add lines
    to the output.
    """
    return "".join(c if c.isprintable() else " " for c in text[:max_chars]).strip()


def count(number: int, what: str) -> str:
    """Returns a number with its noun: ``1 run``, ``2 runs``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def describe_method(kinds: Iterable[str]) -> str:
    """Returns the kinds of the phases that train, in order: ``fedhssl → head``."""
    unique = dict.fromkeys(kinds)
    return " → ".join([kind for kind in unique if kind != MEASURES] or unique)


def list_names(names: Sequence[str]) -> str:
    """Returns names as a list for a person. A long list is cut, with the number of further
    names.
    """
    num_further = len(names) - _MAX_NAMES
    return (
        f"{', '.join(names[:_MAX_NAMES])} and {num_further} more"
        if num_further > 0
        else ", ".join(names)
    )


def shorten(name: str) -> str:
    """Returns a name for a sentence. A long name is cut."""
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}…"


def make_printable(name: str) -> str:
    """Returns a printable name unchanged. A name with other characters, such as a line break,
    becomes a quoted Python string. A long name is cut.
    """
    name = shorten(name)
    return name if name.isprintable() else repr(name)


def align_columns(rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Formats a table as lines with aligned columns. ``rows``: the rows, of which the first has the
    headings. ``right``: the headings of columns that are aligned to the right.
    """
    cells = [tuple(clean(cell, LINE) for cell in row) for row in rows]
    head = cells[0]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()
        for row in cells
    ]


def format_percent(count: int, total: int) -> str:
    """Returns the share of ``count`` in ``total`` in per cent. It is 100 % only if they are equal,
    and 0 % only if ``count`` is 0.
    """
    share = round(100 * count / total) if total else 0
    if share == 0 and count:
        return "less than 1 %"
    return "more than 99 %" if share == 100 and count < total else f"{share} %"


def host_and_port(address: str) -> tuple[str, int]:
    """Splits ``host:port`` (or ``[::1]:7000``) into host and port. Raises ValueError, with a
    message for a person, if ``address`` has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port[:6]) > 65_535:
        raise ValueError(
            f"{clean(address, 100)!r} is not an address. Write host:port, such as 127.0.0.1:7000, "
            "with a port of at most 65535."
        )
    return host.strip("[]"), int(port)


def to_json(value: object, *, compact: bool = False) -> str:
    """Encodes a value as JSON on one line. NaN and infinity, which JSON does not have, become
    null.
    """
    separators = (",", ":") if compact else None
    try:
        return json.dumps(value, allow_nan=False, default=str, separators=separators)
    except ValueError:
        return json.dumps(
            _replace_non_finite(value), allow_nan=False, default=str, separators=separators
        )


def number(value: Any) -> float:
    """Converts a number that ``to_json`` wrote to a float. null becomes NaN. Raises TypeError or
    ValueError if ``value`` is not a number.
    """
    return math.nan if value is None else float(value)


def _replace_non_finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _nan_for_none(value: object) -> object:
    return math.nan if value is None else value


# A text from a peer in a pydantic model. It is made printable.
Words = Annotated[str, AfterValidator(lambda text: clean(text, LINE))]
# A number that ``to_json`` or pydantic wrote, in a pydantic model. null is NaN.
Number = Annotated[float, BeforeValidator(_nan_for_none)]
# It also matches URLs after jdbc: and URLs with one slash.
_URL_LIKE = re.compile(r"[a-z0-9_+.-]:/", re.IGNORECASE)
# It matches up to the last @, because a password may contain an @ that is not written as %40.
_PASSWORD = re.compile(r"(:/+[^:/?]*?(?::|%3a))(.*)(@)", re.DOTALL | re.IGNORECASE)
_OPTION = re.compile(r"([?&;])([^=&;]*)=(\{(?:[^}]|\}\})*\}|[^&;]*)")
# The prefix of a query of DuckDB, and the setting with the folder of its relative paths.
_QUERY = "duckdb:"
_FOLDER = re.compile(r"^duckdb:SET file_search_path = '(?:[^']|'')*'; ")
_MAX_QUERY_CHARS = 100
# The option odbc_connect, whose value is a list of options.
_ODBC = re.compile(r"([?&;])(odbc_connect)=([^&]*)", re.IGNORECASE)
# The names of options whose value is removed.
_OPTION_NAMES = r"[\w .-]*(?:pass|pwd|secret|token|key)[\w .-]*"
_SECRET = re.compile(_OPTION_NAMES, re.IGNORECASE)
_INNER_SECRET = re.compile(rf"(?:{_OPTION_NAMES})=(\{{(?:[^}}]|\}}\}})*\}}|[^&;]*)", re.IGNORECASE)


def hide_passwords(source: str) -> str:
    """Returns a source without its passwords, for a message."""
    if source.startswith(_QUERY):
        # A query is shortened to one line, which is enough to identify it.
        source = " ".join(_FOLDER.sub(_QUERY, source).split())
        source = source if len(source) <= _MAX_QUERY_CHARS else f"{source[:_MAX_QUERY_CHARS]}…"
    if not _URL_LIKE.search(source):
        return source
    text = _ODBC.sub(r"\1\2=***", _PASSWORD.sub(r"\1***\3", source))
    return _OPTION.sub(
        lambda option: f"{option[1]}{option[2]}=***" if _is_secret(option) else option[0], text
    )


def find_passwords(source: str) -> list[str]:
    """Returns the passwords in ``source``, the longest first; an empty list if it does not look
    like a URL.
    """
    if not _URL_LIKE.search(source):
        return []
    password, odbc = _PASSWORD.search(source), _ODBC.search(source)
    values = [] if password is None else [password[2]]
    values += [option[3] for option in _OPTION.finditer(source) if _is_secret(option)]
    if odbc is not None:
        values += [odbc[3], *_INNER_SECRET.findall(unquote_plus(odbc[3]))]
    values += [unquote_plus(value) for value in values]
    return sorted({value for value in values if value}, key=lambda value: (-len(value), value))


def hide_passwords_of(text: str, source: str) -> str:
    """Returns ``text``, such as a database's error message, without the passwords in ``source``."""
    text = text.replace(source, hide_passwords(source))
    for secret in find_passwords(source):
        text = text.replace(secret, "***")
    return text


def _is_secret(option: re.Match[str]) -> bool:
    """Returns whether an option of a URL is a password or contains one in its value. Name and value
    may be percent-encoded.
    """
    name, value = unquote_plus(option[2]), unquote_plus(option[3])
    return _SECRET.fullmatch(name) is not None or _INNER_SECRET.search(value) is not None
