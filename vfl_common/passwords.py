"""Removes passwords from the URLs of databases, and from other texts that look like URLs, before
they appear in messages.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_plus

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
