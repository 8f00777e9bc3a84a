"""How a table is read: the keys of ``[data]`` that ``--set`` gives, and sentences about keys that
name the flag.
"""

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
# The keys that say how a table is read.
READING = (*_TEXTS, "skip_lines", "limit", "memory_mib", "names", "categorical_buckets", *_LISTS)
_OTHER_FLAGS = {"source": "--data", "id": "--id", "label": "--label", "drop": "--drop"}
_NAMED = re.compile(r'\bdata\.([a-z_]+)(?:(?: =| to) (?:(\d+)|"([^"]*)")(?! or "))?')


def settings_for(source: str, given: Sequence[str]) -> DataSettings:
    """Returns the settings by which a table is read. ``given``: ``KEY=VALUE``, each. Raises
    InputError.
    """
    keys: dict[str, Any] = {}
    for each in given:
        key, is_given, text = each.partition("=")
        key = key.strip().removeprefix("data.")
        if not is_given or key not in READING or key in keys:
            raise _wrong(each, key, twice=key in keys)
        keys[key] = _value(key, text)
    return parse(DataSettings, {"source": source, **keys}, "--set" if keys else source)


def keys_of(settings: DataSettings) -> dict[str, Any]:
    """Returns the keys that ``--set`` has given, for a party file."""
    return settings.model_dump(mode="json", include=settings.model_fields_set & set(READING))


def flags_of(text: str) -> list[str]:
    """Returns the flags for the keys of ``[data]`` that a sentence names."""
    flags = []
    for key, number, word in _NAMED.findall(text):
        if key in _OTHER_FLAGS:
            flags.append(_OTHER_FLAGS[key])
        elif key in READING:
            flags.append(f"--set {key}={number or word or '…'}")
    return list(dict.fromkeys(flags))


@contextlib.contextmanager
def telling_flags() -> Iterator[None]:
    """Adds to an InputError that names keys of ``[data]`` which flags give them here."""
    try:
        yield
    except InputError as error:
        text, flags = str(error), flags_of(str(error))
        if not flags or "(here: " in text:
            raise
        raise InputError(error.code, f"{text} (here: {', '.join(flags)})") from None


def _value(key: str, text: str) -> Any:
    """Returns a value: TOML if it is of the key's type, else the text itself."""
    try:
        tables = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        tables = {}
    value = tables["value"] if tables.keys() == {"value"} else text
    # A form for each column.
    if key == "dates" and isinstance(value, dict):
        return value
    if key in _TEXTS:
        return value if isinstance(value, str) else text
    if key in _LISTS:
        return value if isinstance(value, list) else [value if isinstance(value, str) else text]
    return value


def _wrong(given: str, key: str, *, twice: bool) -> InputError:
    what = f"--set {given!r}"
    if twice:
        text = f"{key} is given twice; give it once"
    elif key in _OTHER_FLAGS:
        text = f"use {_OTHER_FLAGS[key]} instead"
    elif key in READING:
        text = f"has no value; write --set {key}=VALUE"
    elif key in DataSettings.model_fields:
        text = (
            f"does not say how the table is read; change data.{key} in the party file that is "
            "written"
        )
    else:
        near = difflib.get_close_matches(key, READING, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(READING))}"
        text = f"is no known KEY=VALUE; {hint}"
    return InputError(Code.CONFIG_INVALID, f"{what}: {text}")
