"""Removes passwords from messages: those in the URL of a database, and in anything that looks like
a URL.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_plus

# Matches also after jdbc:, and with one slash.
_URL_LIKE = re.compile(r"[a-z0-9_+.-]:/", re.IGNORECASE)
# Matches up to the last @: a password may hold an @ that is not written as %40.
_PASSWORD = re.compile(r"(:/+[^:/?]*?(?::|%3a))(.*)(@)", re.DOTALL | re.IGNORECASE)
_OPTION = re.compile(r"([?&;])([^=&;]*)=(\{(?:[^}]|\}\})*\}|[^&;]*)")
# A query of DuckDB, and the folder of its relative paths.
_QUERY = "duckdb:"
_FOLDER = re.compile(r"^duckdb:SET file_search_path = '(?:[^']|'')*'; ")
_LONGEST = 100
# An option whose value is a list of options.
_ODBC = re.compile(r"([?&;])(odbc_connect)=([^&]*)", re.IGNORECASE)
# The names of options whose value is removed.
_NAMES = r"[\w .-]*(?:pass|pwd|secret|token|key)[\w .-]*"
_SECRET = re.compile(_NAMES, re.IGNORECASE)
_INNER = re.compile(rf"(?:{_NAMES})=(\{{(?:[^}}]|\}}\}})*\}}|[^&;]*)", re.IGNORECASE)


def hide_passwords(source: str) -> str:
    """Returns a source for messages: without passwords, if it looks like a URL of any kind."""
    if source.startswith(_QUERY):
        # One line identifies a query.
        source = " ".join(_FOLDER.sub(_QUERY, source).split())
        source = source if len(source) <= _LONGEST else f"{source[:_LONGEST]}…"
    if not _URL_LIKE.search(source):
        return source
    text = _ODBC.sub(r"\1\2=***", _PASSWORD.sub(r"\1***\3", source))
    return _OPTION.sub(
        lambda option: f"{option[1]}{option[2]}=***" if _is_secret(option) else option[0], text
    )


def secrets(source: str) -> list[str]:
    """Returns the passwords in ``source``, the longest first; none unless it looks like a URL."""
    if not _URL_LIKE.search(source):
        return []
    password, odbc = _PASSWORD.search(source), _ODBC.search(source)
    values = [] if password is None else [password[2]]
    values += [option[3] for option in _OPTION.finditer(source) if _is_secret(option)]
    if odbc is not None:
        values += [odbc[3], *_INNER.findall(unquote_plus(odbc[3]))]
    values += [unquote_plus(value) for value in values]
    return sorted({value for value in values if value}, key=lambda value: (-len(value), value))


def hide_passwords_of(text: str, source: str) -> str:
    """Returns a text, such as an error of a database, without the passwords of a source."""
    text = text.replace(source, hide_passwords(source))
    for secret in secrets(source):
        text = text.replace(secret, "***")
    return text


def _is_secret(option: re.Match[str]) -> bool:
    """Returns whether an option of a URL is a password, or has one in its value; both may be
    percent-encoded.
    """
    name, value = unquote_plus(option[2]), unquote_plus(option[3])
    return _SECRET.fullmatch(name) is not None or _INNER.search(value) is not None
