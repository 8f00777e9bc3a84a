"""What a ``data.source`` is by its spelling: a file of some format, a database, a named set."""

from __future__ import annotations

import re
from os.path import normpath
from pathlib import Path
from typing import Literal

# Before a party's name: the source is a table in memory, which the library was given.
FRAME = "frame of "
# Before the rest of a source that is no path; C:\ is one.
_NAMED = re.compile(r"([a-z][a-z0-9_]+):")
SETS = ("sklearn", "torchvision")
# With the folder of relative paths, once that is known. ``duckdb://…`` is a URL of SQLAlchemy's.
_DUCKDB = re.compile(r"duckdb:(?!//)(?:SET file_search_path = '((?:[^']|'')*)'; )?(.*)", re.DOTALL)
# A URL of SQLAlchemy, DIALECT+DRIVER://.
URL = re.compile(r"([a-z][a-z0-9_]*)(\+[a-z0-9_]+)?://", re.IGNORECASE)
_SQLITE = re.compile(r"(sqlite(?:\+[a-z0-9_]+)?:///)([^?]+)(.*)", re.DOTALL | re.IGNORECASE)
# Databases that are known without +DRIVER.
_DATABASES = ("postgresql", "postgres", "sqlite", "mysql", "mariadb", "oracle", "mssql")
# Endings of files that hold one other file.
PACKED = (".gz", ".bz2")
TEXT_FILES = tuple(
    ending + packed for packed in ("", *PACKED) for ending in (".csv", ".tsv", ".txt")
)
# Endings of files that hold several files.
_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
# What a file is that its name does not say.
Format = Literal["text", "libsvm", "idx", "mat"]
_ENDINGS: dict[str, Format] = {
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
# In a folder of images: lists them.
IMAGES = "index.csv"
# The last two are old formats, and are refused in a sentence.
_EXCEL = (".xlsx", ".xlsm", ".xls", ".xlsb")


def reader_of(source: str) -> str | None:
    """Returns the NAME of a source ``NAME:…``: sklearn, torchvision, or a plug-in; None for all
    other sources.
    """
    named = None if is_database(source) else _NAMED.match(source)
    return named[1] if named else None


def is_database(source: str) -> bool:
    """Returns whether a source is the URL of a database by its spelling; ``data.query`` makes any
    URL one.
    """
    url = URL.match(source)
    return url is not None and (url[2] is not None or url[1].lower() in _DATABASES)


def is_duckdb(source: str) -> bool:
    """Returns whether a source is a query of DuckDB: ``duckdb:SELECT …``."""
    return _DUCKDB.fullmatch(source) is not None


def is_excel(source: str) -> bool:
    """Returns whether a source is an Excel workbook, by its name."""
    return is_path(source) and source.lower().endswith(_EXCEL)


def is_path(source: str) -> bool:
    """Returns whether a source is a file or a folder."""
    return reader_of(source) is None and not is_database(source) and not source.startswith(FRAME)


def resolve_source(source: str, base: Path) -> str:
    """Returns a source; if it is a path, or a file of SQLite, it is absolute, and a relative one
    starts at ``base``. A query of DuckDB gets ``base`` as the folder of its relative paths.
    """
    if is_duckdb(source):
        folder, query = folder_and_query(source)
        quoted = normpath(base.absolute() / (folder or "")).replace("'", "''")
        return f"duckdb:SET file_search_path = '{quoted}'; {query}"
    sqlite = _SQLITE.fullmatch(source)
    if sqlite is not None and sqlite[2] != ":memory:":
        return f"{sqlite[1]}{normpath(base.absolute() / sqlite[2])}{sqlite[3]}"
    return normpath(base.absolute() / source) if is_path(source) else source


def folder_and_query(source: str) -> tuple[str | None, str]:
    """Returns the folder of relative paths, None if it is not known, and the SELECT of a source of
    DuckDB, without a semicolon at its end.
    """
    match = _DUCKDB.fullmatch(source)
    folder, query = match.groups() if match else (None, source)
    query = query.rstrip().removesuffix(";").strip()
    return (None if folder is None else folder.replace("''", "'")), query


def format_of(source: str) -> Format | None:
    """Returns what a file is by its name, without the ending of what packs it; None of others."""
    name = source.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), None)


def split_member(source: str) -> tuple[str, str | None]:
    """Returns a path, and the member that it names of an archive (``archive.zip/member.csv``); None
    of a path that names none.
    """
    low = source.lower()
    ends = [low.find(f"{ending}/") + len(ending) for ending in _ARCHIVES if f"{ending}/" in low]
    end = min(ends, default=0)
    if not end or Path(source[:end]).is_dir():
        return source, None
    return source[:end], source[end + 1 :]


def is_archive(source: str) -> bool:
    """Returns whether a file holds several others, by its name."""
    return source.lower().endswith(_ARCHIVES)
