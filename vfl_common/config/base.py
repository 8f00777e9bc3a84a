"""The base of every section of a TOML file: frozen, strict about keys, with errors of one sentence.
A file of another kind, such as a party file given in place of its recipe, is refused.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from os.path import normpath
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails

from vfl_common.errors import Code, InputError
from vfl_common.text import clean, hide_passwords

S = TypeVar("S", bound="Section")

# The maximum length of a wrong value in a message, in characters.
_MAX_SHOWN = 60
# {pydantic's name of a type: the words for it in a message}.
_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text in quotes",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
    "model_attributes": "a table",
}
# The types whose values are written without quotes in TOML.
_UNQUOTED_TYPES = ("int", "float", "bool")
_UNQUOTED = re.compile(r"true|false|[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")


class Section(BaseModel):
    """A table of a TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_as_written(cls, value: Any) -> Any:
        """Refuses unknown keys and values of a similar type: pydantic would accept "3" or 3.0 in
        place of the integer 3.
        """
        if isinstance(value, dict):
            fields = {field.alias or name: field for name, field in cls.model_fields.items()}
            for key, item in value.items():
                if key not in fields:
                    tables_with_key = [
                        f"{name}.{key}"
                        for name, field in fields.items()
                        if _has_key(field.annotation, key)
                    ]
                    suggestions = tables_with_key or difflib.get_close_matches(
                        str(key), fields, n=1, cutoff=0.5
                    )
                    hint = (
                        f"did you mean {suggestions[0]!r}?"
                        if suggestions
                        else f"known keys: {', '.join(sorted(fields))}"
                    )
                    raise ValueError(f"unknown key {key!r}; {hint}")
                type_error = _find_type_error(_find_types(fields[key].annotation), item)
                if type_error is not None:
                    raise ValidationError.from_exception_data(
                        key, [{**type_error, "loc": (key, *type_error["loc"])}]
                    )
        return value


def _has_key(annotation: Any, key: Any) -> bool:
    """Returns whether a field's type is a table that has this key, or a union of which one table
    has it.
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return key in annotation.model_fields
    return get_origin(annotation) in (Union, UnionType) and any(
        _has_key(part, key) for part in get_args(annotation)
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


def match_pattern(pattern: str, words: str) -> AfterValidator:
    """Returns a pydantic validator that checks a text against a regular expression. The error
    message shows ``words``, which say what to write, instead of the pattern.
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
    """Validates ``value`` as ``model``. Raises InputError with the first mistake, in the form
    ``where: key: problem``.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details = _select_error(error.errors(include_url=False))
        key = ".".join(
            _find_written_keys(value, details["loc"], missing=details["type"] == "missing")
        )
        raise InputError(
            Code.CONFIG_INVALID, f"{where}: {key + ': ' if key else ''}{_describe_error(details)}"
        ) from None


def _select_error(errors: list[ErrorDetails]) -> ErrorDetails:
    """Returns the first mistake. If a value may be a table or text, and a table was written,
    returns a mistake in the table.
    """
    for error in errors:
        *place, last = error["loc"] or ("",)
        # For a wrong table that could also be text, pydantic adds the error "not a string". Its
        # location is 'str', or 'function-after[check(), str]' if the text has a validator.
        is_text_error = str(last).split(", ")[-1] in ("str", "str]") and isinstance(
            error["input"], dict
        )
        other_places = (other["loc"][: len(place)] for other in errors if other is not error)
        if not is_text_error or (*place,) not in other_places:
            return error
    return errors[0]


def _find_written_keys(value: Any, place: Sequence[int | str], *, missing: bool) -> list[str]:
    """Returns the path of keys from the top of the file to a mistake, without the tags of types
    that pydantic inserts. ``missing``: the mistake is that the last key is absent.
    """
    keys, node = list[str](), value
    for number, part in enumerate(place, 1):
        # Pydantic inserted this part of the path: the file does not have it.
        unwritten = (
            part not in node if isinstance(node, dict) else isinstance(node, str | float | int)
        )
        if unwritten and not (missing and number == len(place)):
            continue
        keys.append(str(part))
        if isinstance(node, dict):
            node = node.get(part)
        else:
            is_index = isinstance(node, list | tuple) and isinstance(part, int) and part < len(node)
            node = node[part] if is_index else None
    return keys


KindName = Annotated[
    str, match_pattern(r"[a-z][a-z0-9_]*", "lower-case letters, digits and '_', a letter first")
]


def gather_settings(value: Any, own_keys: tuple[str, ...]) -> Any:
    """Moves all keys of a table except ``own_keys`` into a table ``settings``, where the model
    expects the settings of a plug-in or method.
    """
    if not isinstance(value, dict) or "kind" not in value or "settings" in value:
        return value
    own_items = {key: value[key] for key in own_keys if key in value}
    return own_items | {
        "settings": {key: item for key, item in value.items() if key not in own_keys}
    }


class OfPlugIn(Section):
    """A table whose ``kind`` names a plug-in, which checks its own ``settings``: all keys except
    ``kind``.
    """

    kind: KindName
    """The name under which the plug-in is registered."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The plug-in's own settings."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        return gather_settings(value, ("kind",))


def _describe_error(error: ErrorDetails) -> str:
    """Describes an error of pydantic in one sentence, with the wrong value."""
    kind, text, context = error["type"], error["msg"], error.get("ctx", {})
    if kind == "value_error":
        return text.removeprefix("Value error, ")
    if kind == "missing":
        return "missing. Add it."
    if kind == "union_tag_invalid":
        known = context["expected_tags"].replace("'", "")
        return f"there is no kind {context['tag']!r}. Choose one of {known}."
    if kind == "too_short":
        return f"needs at least {context['min_length']} (got {context['actual_length']})."
    if kind == "union_tag_not_found":
        return "has no 'kind'. Add it."
    if kind.endswith("_type") and kind.removesuffix("_type") in _TYPE_WORDS:
        return _describe_wrong_type(kind.removesuffix("_type"), error["input"])
    # The value must be one of several choices, or is out of range.
    if text.startswith("Input should be "):
        bound = text.removeprefix("Input should be ")
        return f"must be {bound} (got {_format_value(error['input'])})."
    return text


def _describe_wrong_type(wanted: str, value: Any) -> str:
    """Returns the sentence that a value does not have the type ``wanted``, which is a key of
    ``_TYPE_WORDS``.
    """
    is_quoted = wanted in _UNQUOTED_TYPES and isinstance(value, str) and _UNQUOTED.fullmatch(value)
    advice = " Write it without quotes." if is_quoted else ""
    return f"must be {_TYPE_WORDS[wanted]} (got {_format_value(value)}).{advice}"


def _find_types(annotation: Any) -> set[Any]:
    """Returns the basic types in a field's annotation: int and None for ``tuple[PositiveInt, ...] |
    None``.
    """
    if get_origin(annotation) is Annotated:
        return _find_types(get_args(annotation)[0])
    parts = [part for part in get_args(annotation) if part is not Ellipsis]
    return set[Any]().union(*map(_find_types, parts)) if parts else {annotation}


def _find_type_error(kinds: set[Any], value: Any) -> InitErrorDetails | None:
    """Returns pydantic's error if a numeric or boolean field has a value of another type; None if
    the type may be right.

    An int is accepted for a float. Values that are neither text nor numbers are left to pydantic.
    """
    if not kinds <= {int, float, bool, type(None)}:
        return None
    error_type = "bool_type" if bool in kinds else "float_type" if float in kinds else "int_type"
    allowed_types = (kinds - {type(None)}) | ({int} if float in kinds else set())
    is_list = isinstance(value, list | tuple)
    for place, item in enumerate(value if is_list else [value]):
        # In Python True is an int, but in a file it is not a number.
        fits = isinstance(item, tuple(allowed_types)) and (
            bool in allowed_types or not isinstance(item, bool)
        )
        if isinstance(item, str | int | float) and not fits:
            return {"type": error_type, "loc": (place,) if is_list else (), "input": item}
    return None


def _format_value(value: Any) -> str:
    """Formats a value as in a TOML file. A list or a table becomes the words 'a list' or 'a
    table'.
    """
    if isinstance(value, dict | list | tuple):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        # A source such as "postgresql://…" may hold a password.
        value = hide_passwords(value)
        text = clean(value, _MAX_SHOWN)
        return repr(text if len(value) <= _MAX_SHOWN else f"{text}…")
    # TOML writes true, false, inf and nan.
    return str(value).lower()


Kind = Literal["recipe", "party file", "study"]
_STUDY_KEYS = ("seeds", "methods", "finetune", "search")


def detect_kind(tables: dict[str, Any]) -> Kind | None:
    """Returns the kind of file that has these tables; None if no key shows it."""
    if "phases" in tables:
        return "recipe"
    if "recipe" not in tables:
        return None
    return "study" if any(key in tables for key in _STUDY_KEYS) else "party file"


def read_tables(path: Path, wanted: Kind) -> dict[str, Any]:
    """Reads the tables of a file of the kind ``wanted``. Raises InputError if the file is missing,
    is not TOML, or is of another kind.
    """
    tables = read_toml(path)
    kind = detect_kind(tables)
    if kind is not None and kind != wanted:
        raise InputError(
            Code.CONFIG_INVALID, f"{path}: is a {kind}. {_advice(path, tables, wanted)}"
        )
    return tables


def _advice(path: Path, tables: dict[str, Any], wanted: Kind) -> str:
    recipe_path = tables.get("recipe")
    if wanted == "recipe" and isinstance(recipe_path, str):
        return f"Give the recipe that it names: {normpath(path.parent / recipe_path)}."
    return f"Give a {wanted} instead."
