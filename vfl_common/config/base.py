"""The base of every section of a TOML file: frozen, strict about keys, errors in one sentence."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails

from vfl_common.errors import Code, InputError
from vfl_common.passwords import hide_passwords
from vfl_common.text import clean

S = TypeVar("S", bound="Section")

# Characters of a wrong value in a message.
_MAX_SHOWN = 60
# Pydantic's types, for a person.
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text in quotes",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
    "model_attributes": "a table",
}
# A file has them without quotes.
_BARE = ("int", "float", "bool")
_UNQUOTED = re.compile(r"true|false|[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")


class Section(BaseModel):
    """A table of a TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_as_written(cls, value: Any) -> Any:
        """Refuses unknown keys, and "3" or 3.0 where 3 is meant, which pydantic would take for
        it.
        """
        if isinstance(value, dict):
            known = {field.alias or name: field for name, field in cls.model_fields.items()}
            for key, item in value.items():
                if key not in known:
                    within = [
                        f"{name}.{key}"
                        for name, field in known.items()
                        if _holds(field.annotation, key)
                    ]
                    near = within or difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
                    hint = (
                        f"did you mean {near[0]!r}?"
                        if near
                        else f"known keys: {', '.join(sorted(known))}"
                    )
                    raise ValueError(f"unknown key {key!r}; {hint}")
                wrong = _other_type(_kinds(known[key].annotation), item)
                if wrong is not None:
                    raise ValidationError.from_exception_data(
                        key, [{**wrong, "loc": (key, *wrong["loc"])}]
                    )
        return value


def _holds(annotation: Any, key: Any) -> bool:
    """Returns whether a field is a table with this key, or one of several tables of which one has
    it.
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return key in annotation.model_fields
    return get_origin(annotation) in (Union, UnionType) and any(
        _holds(part, key) for part in get_args(annotation)
    )


def read_toml(path: Path) -> dict[str, Any]:
    """Reads the tables of a TOML file. Raises InputError if it is missing or is not TOML."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise InputError(Code.FILE_INVALID, f"{path}: no such file. Check the path.") from None
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror}). Check its permissions."
        ) from None
    except (ValueError, RecursionError) as error:
        # A TOMLDecodeError is a ValueError.
        raise InputError(
            Code.CONFIG_INVALID, f"{path}: is not valid TOML ({error}). Correct this place."
        ) from None


def has_form(pattern: str, words: str) -> AfterValidator:
    """Makes the check that a text has a form. Its message says in ``words`` what to write, and
    shows no pattern.
    """
    form = re.compile(pattern)

    def check(text: str) -> str:
        if not form.fullmatch(text):
            raise ValueError(f"{_format_value(text)} cannot be used. Write {words}.")
        return text

    # The reference of keys shows these words as the type.
    check.__doc__ = words
    return AfterValidator(check)


def parse(model: type[S], value: Any, where: str) -> S:
    """Returns ``value`` as ``model``. Raises InputError with the first mistake: ``where: key:
    what``.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = _first(error.errors(include_url=False))
        key = ".".join(_keys(value, first["loc"], missing=first["type"] == "missing"))
        raise InputError(
            Code.CONFIG_INVALID, f"{where}: {key + ': ' if key else ''}{_sentence(first)}"
        ) from None


def _first(errors: list[ErrorDetails]) -> ErrorDetails:
    """Returns the first mistake; in a table that may also be text, one of the table's."""
    for error in errors:
        *place, last = error["loc"] or ("",)
        # Pydantic also says of a table with a mistake that it is no text: of one that is checked,
        # at function-after[check(), str].
        beside = str(last).split(", ")[-1] in ("str", "str]") and isinstance(error["input"], dict)
        others = (other["loc"][: len(place)] for other in errors if other is not error)
        if not beside or (*place,) not in others:
            return error
    return errors[0]


def _keys(value: Any, place: Sequence[int | str], *, missing: bool) -> list[str]:
    """Returns the keys that people wrote on the way to a mistake, without the kind of a table or
    of a value, which pydantic puts between them. ``missing``: the last key is not there.
    """
    keys, at = list[str](), value
    for number, part in enumerate(place, 1):
        # Nobody wrote it.
        unwritten = part not in at if isinstance(at, dict) else isinstance(at, str | float | int)
        if unwritten and not (missing and number == len(place)):
            continue
        keys.append(str(part))
        if isinstance(at, dict):
            at = at.get(part)
        else:
            inside = isinstance(at, list | tuple) and isinstance(part, int) and part < len(at)
            at = at[part] if inside else None
    return keys


KindName = Annotated[
    str, has_form(r"[a-z][a-z0-9_]*", "lower-case letters, digits and '_', a letter first")
]


def gather_settings(value: Any, own: tuple[str, ...]) -> Any:
    """Turns ``{own…, rest…}``, as people write it, into ``{own…, settings: {rest…}}``."""
    if not isinstance(value, dict) or "kind" not in value or "settings" in value:
        return value
    own_items = {key: value[key] for key in own if key in value}
    return own_items | {"settings": {key: item for key, item in value.items() if key not in own}}


class OfPlugIn(Section):
    """A table whose ``kind`` names a plug-in, which checks its own ``settings``: the keys beside
    ``kind``.
    """

    kind: KindName
    """The name of what a plug-in brings."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The plug-in's own settings."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        return gather_settings(value, ("kind",))


def _sentence(error: ErrorDetails) -> str:
    """Says what is wrong with a value, with the value that was found."""
    kind, text, context = error["type"], error["msg"], error.get("ctx", {})
    if kind == "value_error":
        return text.removeprefix("Value error, ")
    if kind == "missing":
        return "missing. Add it."
    if kind == "union_tag_invalid":
        known = context["expected_tags"].replace("'", "")
        return f"there is no kind {context['tag']!r}. Take one of {known}."
    if kind == "too_short":
        return f"needs at least {context['min_length']} (got {context['actual_length']})."
    if kind == "union_tag_not_found":
        return "has no 'kind'. Add it."
    if kind.endswith("_type") and kind.removesuffix("_type") in _WORDS:
        return _wrong(kind.removesuffix("_type"), error["input"])
    # A choice, or a bound.
    if text.startswith("Input should be "):
        bound = text.removeprefix("Input should be ")
        return f"must be {bound} (got {_format_value(error['input'])})."
    return text


def _wrong(wanted: str, value: Any) -> str:
    """Says that a value has another type than ``wanted``, a key of ``_WORDS``."""
    bare = wanted in _BARE and isinstance(value, str) and _UNQUOTED.fullmatch(value)
    quotes = " Write it without quotes." if bare else ""
    return f"must be {_WORDS[wanted]} (got {_format_value(value)}).{quotes}"


def _kinds(annotation: Any) -> set[Any]:
    """Returns the types in a field's annotation: int and None of ``tuple[PositiveInt, ...] |
    None``.
    """
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    parts = [part for part in get_args(annotation) if part is not Ellipsis]
    return set[Any]().union(*map(_kinds, parts)) if parts else {annotation}


def _other_type(kinds: set[Any], value: Any) -> InitErrorDetails | None:
    """Returns pydantic's error if a field of numbers has a value of another type; None if it may be
    right.

    A whole number may stand for any other. What is neither text nor number is left to pydantic.
    """
    if not kinds <= {int, float, bool, type(None)}:
        return None
    wanted = "bool_type" if bool in kinds else "float_type" if float in kinds else "int_type"
    right = (kinds - {type(None)}) | ({int} if float in kinds else set())
    several = isinstance(value, list | tuple)
    for place, item in enumerate(value if several else [value]):
        # True is an int to Python, and no number to a person.
        fits = isinstance(item, tuple(right)) and (bool in right or not isinstance(item, bool))
        if isinstance(item, str | int | float) and not fits:
            return {"type": wanted, "loc": (place,) if several else (), "input": item}
    return None


def _format_value(value: Any) -> str:
    """Returns a value as a TOML file has it; lists and tables only by these words."""
    if isinstance(value, dict | list | tuple):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        # A source such as "postgresql://…" may hold a password.
        value = hide_passwords(value)
        text = clean(value, _MAX_SHOWN)
        return repr(text if len(value) <= _MAX_SHOWN else f"{text}…")
    # TOML writes true, false, inf and nan.
    return str(value).lower()
