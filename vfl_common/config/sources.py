"""Recognises the kind of a ``data.source`` from its text (a file of some format, a database, a
named data set), and the settings of a serving party's feature store, ``serve.store``.
"""

from __future__ import annotations

import re
from os.path import normpath
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from vfl_common.config.base import Section, match_pattern
from vfl_common.text import hide_passwords

# The prefix of a source that is a table in memory, passed to the Python API; the party's name
# follows.
FRAME = "frame of "
# The prefix of a source that is not a path. A single letter is not a prefix, because C:\ begins a
# path.
_NAME_PREFIX = re.compile(r"([a-z][a-z0-9_]+):")
SETS = ("sklearn", "torchvision")
# A query of DuckDB, with the folder of its relative paths once that is known. ``duckdb://…`` is a
# URL of SQLAlchemy instead.
_DUCKDB = re.compile(r"duckdb:(?!//)(?:SET file_search_path = '((?:[^']|'')*)'; )?(.*)", re.DOTALL)
# The beginning of a URL of SQLAlchemy, DIALECT+DRIVER://.
URL = re.compile(r"([a-z][a-z0-9_]*)(\+[a-z0-9_]+)?://", re.IGNORECASE)
_SQLITE = re.compile(r"(sqlite(?:\+[a-z0-9_]+)?:///)([^?]+)(.*)", re.DOTALL | re.IGNORECASE)
# The dialects that are recognised without +DRIVER.
_DIALECTS = ("postgresql", "postgres", "sqlite", "mysql", "mariadb", "oracle", "mssql")
# Suffixes of compressed files.
PACKED = (".gz", ".bz2")
TEXT_FILES = tuple(
    ending + packed for packed in ("", *PACKED) for ending in (".csv", ".tsv", ".txt")
)
# Suffixes of archives with several files.
_ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")
# The file formats that ``data.format`` can name.
Format = Literal["text", "libsvm", "idx", "mat"]
_FORMAT_OF_SUFFIX: dict[str, Format] = {
    ".csv": "text",
    ".tsv": "text",
    ".txt": "text",
    ".libsvm": "libsvm",
    ".svm": "libsvm",
    ".svmlight": "libsvm",
    "-ubyte": "idx",
    ".idx": "idx",
    ".mat": "mat",
}
# The file in a folder of images that lists them.
IMAGES = "index.csv"
# Suffixes of Excel workbooks. The last two are old formats, which are refused with an explanation.
_EXCEL_SUFFIXES = (".xlsx", ".xlsm", ".xls", ".xlsb")


def get_reader(source: str) -> str | None:
    """Returns the NAME of a source ``NAME:…``: sklearn, torchvision, or a plug-in; None for all
    other sources.
    """
    prefix = None if is_database(source) else _NAME_PREFIX.match(source)
    return prefix[1] if prefix else None


def is_database(source: str) -> bool:
    """Returns whether a source is the URL of a known database. With ``data.query``, any other URL
    is also treated as a database.
    """
    url = URL.match(source)
    return url is not None and (url[2] is not None or url[1].lower() in _DIALECTS)


def is_duckdb(source: str) -> bool:
    """Returns whether a source is a query of DuckDB: ``duckdb:SELECT …``."""
    return _DUCKDB.fullmatch(source) is not None


def is_excel(source: str) -> bool:
    """Returns whether a source is an Excel workbook, by its name."""
    return is_path(source) and source.lower().endswith(_EXCEL_SUFFIXES)


def is_path(source: str) -> bool:
    """Returns whether a source is a file or a folder."""
    return get_reader(source) is None and not is_database(source) and not source.startswith(FRAME)


def resolve_source(source: str, base: Path) -> str:
    """Makes the path of a source absolute; relative paths start at ``base``. A query of DuckDB gets
    ``base`` as the folder of its relative paths. Other sources stay unchanged.
    """
    if is_duckdb(source):
        folder, query = split_duckdb_source(source)
        quoted = normpath(base.absolute() / (folder or "")).replace("'", "''")
        return f"duckdb:SET file_search_path = '{quoted}'; {query}"
    sqlite = _SQLITE.fullmatch(source)
    if sqlite is not None and sqlite[2] != ":memory:":
        return f"{sqlite[1]}{normpath(base.absolute() / sqlite[2])}{sqlite[3]}"
    return normpath(base.absolute() / source) if is_path(source) else source


def split_duckdb_source(source: str) -> tuple[str | None, str]:
    """Returns the folder of relative paths (None if it is not known) and the SELECT of a DuckDB
    source, without a final semicolon.
    """
    match = _DUCKDB.fullmatch(source)
    folder, query = match.groups() if match else (None, source)
    query = query.rstrip().removesuffix(";").strip()
    return (None if folder is None else folder.replace("''", "'")), query


def get_format(source: str) -> Format | None:
    """Returns the format of a file from its suffix, ignoring a suffix of compression; None if the
    suffix is not known.
    """
    name = source.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return next((kind for ending, kind in _FORMAT_OF_SUFFIX.items() if name.endswith(ending)), None)


def split_member(source: str) -> tuple[str, str | None]:
    """Splits a path such as ``archive.zip/member.csv`` into the path of the archive and the member.
    The member is None if the path is not in an archive.
    """
    low = source.lower()
    ends = [
        low.find(f"{ending}/") + len(ending) for ending in _ARCHIVE_SUFFIXES if f"{ending}/" in low
    ]
    end = min(ends, default=0)
    if not end or Path(source[:end]).is_dir():
        return source, None
    return source[:end], source[end + 1 :]


def is_archive(source: str) -> bool:
    """Returns whether a file is an archive, by its suffix."""
    return source.lower().endswith(_ARCHIVE_SUFFIXES)


# The maximum number of open connections to a feature store.
Connections = Annotated[int, Field(gt=0, le=64)]


class DatabaseStore(Section):
    """A database that is queried for the rows of each request."""

    kind: Literal["database"]
    """A database that is queried for the rows of each request."""
    source: str | None = None
    """The URL of the database. Default: ``data.source``."""
    query: str
    """The SELECT that returns the rows with the ids ``:ids``: the id columns and the training
    columns. PostgreSQL: ``WHERE id = ANY(:ids)``; every other database: ``WHERE id IN :ids``.
    """
    connections: Connections = 4
    """The maximum number of open connections, and so of requests at the same time."""

    @field_validator("source")
    @classmethod
    def _is_database(cls, value: str | None) -> str | None:
        if value is not None and not is_database(value):
            raise ValueError(
                f"{hide_passwords(value)!r} is not a database. "
                "Write its URL, such as postgresql://USER@HOST/NAME."
            )
        return value


class ServiceStore(Section):
    """A feature service that is called over HTTP for the rows of each request."""

    kind: Literal["service"]
    """An HTTP service with SecretFlow-Serving's interface ``BatchFetchFeature``."""
    url: Annotated[
        str, match_pattern(r"https?://[^\s/@?#]+(/[^\s?#]*)?", "http(s)://HOST:PORT/PATH")
    ]
    """The URL of the service: ``https://HOST:PORT/BatchFeatureService/BatchFetchFeature``."""
    service_id: str | None = None
    """The ``model_service_id`` of each request. Default: the recipe's name."""
    context: str = ""
    """The ``query_context`` of each request."""
    ca: str | None = None
    """The PEM file of the CA that must have issued the service's certificate. Default: the
    machine's CAs.
    """
    certificate: str | None = None
    """The PEM file of this party's certificate, for a service that requires a client certificate.
    """
    key: str | None = None
    """The PEM file of that certificate's key, with mode 0600."""
    connections: Connections = 4
    """The maximum number of open connections, and so of requests at the same time."""


StoreSettings = Annotated[DatabaseStore | ServiceStore, Field(discriminator="kind")]


def absolute_store(store: DatabaseStore | ServiceStore, base: Path) -> DatabaseStore | ServiceStore:
    """Returns a copy of the settings in which relative paths start at ``base``."""
    update: dict[str, str] = {}
    if isinstance(store, DatabaseStore) and store.source is not None:
        update = {"source": resolve_source(store.source, base)}
    if isinstance(store, ServiceStore):
        files = {key: getattr(store, key) for key in ("ca", "certificate", "key")}
        update = {key: str(base / path) for key, path in files.items() if path is not None}
    return store.model_copy(update=update)
