"""Keeps passwords out of sentences: those in the URL of a database, and in whatever else looks like
a URL.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_plus

# Also after jdbc:, or after a folder with one slash.
_URL_LIKE = re.compile(r"[a-z0-9_+.-]:/", re.IGNORECASE)
# To the last @: a password may hold one that is not %40.
_PASSWORD = re.compile(r"(:/+[^:/?]*?(?::|%3a))(.*)(@)", re.DOTALL | re.IGNORECASE)
_OPTION = re.compile(r"([?&;])([^=&;]*)=(\{(?:[^}]|\}\})*\}|[^&;]*)")
# A query of DuckDB, and the folder of its relative paths.
_QUERY = "duckdb:"
_FOLDER = re.compile(r"^duckdb:SET file_search_path = '(?:[^']|'')*'; ")
_LONGEST = 100
# Its value has options of its own.
_ODBC = re.compile(r"([?&;])(odbc_connect)=([^&]*)", re.IGNORECASE)
# Of options whose value is not shown.
_NAMES = r"[\w .-]*(?:pass|pwd|secret|token|key)[\w .-]*"
_SECRET = re.compile(_NAMES, re.IGNORECASE)
_INNER = re.compile(rf"(?:{_NAMES})=(\{{(?:[^}}]|\}}\}})*\}}|[^&;]*)", re.IGNORECASE)


def shown(source: str) -> str:
    """Returns a source for people, without the passwords of what looks like a URL, of whatever kind
    and case.
    """
    if source.startswith(_QUERY):
        # One line of a query is enough to know it by.
        source = " ".join(_FOLDER.sub(_QUERY, source).split())
        source = source if len(source) <= _LONGEST else f"{source[:_LONGEST]}…"
    if not _URL_LIKE.search(source):
        return source
    text = _ODBC.sub(r"\1\2=***", _PASSWORD.sub(r"\1***\3", source))
    return _OPTION.sub(
        lambda found: f"{found[1]}{found[2]}=***" if _is_secret(found) else found[0], text
    )


def secrets(source: str) -> list[str]:
    """Returns the passwords in what looks like a URL, for those who must keep them out of a
    text.
    """
    if not _URL_LIKE.search(source):
        return []
    password, odbc = _PASSWORD.search(source), _ODBC.search(source)
    found = [] if password is None else [password[2]]
    found += [option[3] for option in _OPTION.finditer(source) if _is_secret(option)]
    if odbc is not None:
        found += [odbc[3], *_INNER.findall(unquote_plus(odbc[3]))]
    decoded = [unquote_plus(each) for each in found]
    # Longest first.
    return sorted(
        {each for each in (*found, *decoded) if each}, key=lambda each: (-len(each), each)
    )


def hidden(text: str, source: str) -> str:
    """Returns a text, such as the words of a server or of another's program, without the passwords
    of a source.
    """
    text = text.replace(source, shown(source))
    for secret in secrets(source):
        text = text.replace(secret, "***")
    return text


def _is_secret(option: re.Match[str]) -> bool:
    """Returns whether an option of a URL is a password, or has one in its value; both may be
    percent-encoded.
    """
    name, value = unquote_plus(option[2]), unquote_plus(option[3])
    return _SECRET.fullmatch(name) is not None or _INNER.search(value) is not None
