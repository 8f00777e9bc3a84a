"""The keys of ``[data]`` for ``--set``, and the options for keys that an error names."""

from __future__ import annotations

import contextlib
import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError

_TEXTS = (
    "sheet",
    "query",
    "format",
    "separator",
    "encoding",
    "decimal",
    "thousands",
    "dates",
    "limit_by",
    "scratch",
)
_LISTS = ("numeric", "categorical", "na")
# The keys that control how a table is read.
READING = (*_TEXTS, "skip_lines", "limit", "memory_mib", "names", "categorical_buckets", *_LISTS)
_OTHER_FLAGS = {"source": "--data", "id": "--id", "label": "--label", "drop": "--drop"}
_NAMED = re.compile(r'\bdata\.([a-z_]+)(?:(?: =| to) (?:(\d+)|"([^"]*)")(?! or "))?')


def parse_settings(source: str, pairs: Sequence[str]) -> DataSettings:
    """Returns the data settings of a table. ``pairs``: the ``KEY=VALUE`` texts of ``--set``. Raises
    InputError.
    """
    keys: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip().removeprefix("data.")
        if not equals or key not in READING or key in keys:
            raise _make_error(pair, key, twice=key in keys)
        keys[key] = _parse_value(key, text)
    return parse(DataSettings, {"source": source, **keys}, "--set" if keys else source)


def get_reading_keys(settings: DataSettings) -> dict[str, Any]:
    """Returns the keys that ``--set`` has set, for a party file."""
    return settings.model_dump(mode="json", include=settings.model_fields_set & set(READING))


def find_flags(text: str) -> list[str]:
    """Returns the options for the keys of ``[data]`` that a sentence names."""
    flags = []
    for key, number, word in _NAMED.findall(text):
        if key in _OTHER_FLAGS:
            flags.append(_OTHER_FLAGS[key])
        elif key in READING:
            flags.append(f"--set {key}={number or word or '…'}")
    return list(dict.fromkeys(flags))


@contextlib.contextmanager
def adding_flags() -> Iterator[None]:
    """Adds the matching options to an InputError that names keys of ``[data]``."""
    try:
        yield
    except InputError as error:
        text, flags = str(error), find_flags(str(error))
        if not flags or "(here: " in text:
            raise
        raise InputError(error.code, text + f" (here: {', '.join(flags)})") from None


def _parse_value(key: str, text: str) -> Any:
    """Parses a value as TOML. If the result does not have the key's type, the text itself is
    returned.
    """
    try:
        tables = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        tables = {}
    value = tables["value"] if tables.keys() == {"value"} else text
    # The key ``dates`` may be a table with a format for each column.
    if key == "dates" and isinstance(value, dict):
        return value
    if key in _TEXTS:
        return value if isinstance(value, str) else text
    if key in _LISTS:
        return value if isinstance(value, list) else [value if isinstance(value, str) else text]
    return value


def _make_error(pair: str, key: str, *, twice: bool) -> InputError:
    where = f"--set {pair!r}"
    if twice:
        return InputError(Code.CONFIG_INVALID, f"{where}: {key} is given twice. Give it once.")
    if key in _OTHER_FLAGS:
        return InputError(
            Code.CONFIG_INVALID, f"{where}: has its own option. Use {_OTHER_FLAGS[key]}."
        )
    if key in READING:
        return InputError(Code.CONFIG_INVALID, f"{where}: has no value. Write --set {key}=VALUE.")
    if key in DataSettings.model_fields:
        return InputError(
            Code.CONFIG_INVALID,
            f"{where}: does not affect how the table is read. Change data.{key} in the party "
            "file afterwards.",
        )
    near = difflib.get_close_matches(key, READING, n=1, cutoff=0.5)
    return InputError(
        Code.CONFIG_INVALID,
        f"{where}: unknown key {key!r}. Choose "
        f"{near[0] if near else 'one of ' + ', '.join(sorted(READING))}.",
    )
