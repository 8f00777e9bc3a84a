"""Tables of the keys of a TOML section, from its model: name, type, default, meaning."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

HEADINGS = ("key", "type", "default", "meaning")
_WORDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Any: "any value",
}
_BESIDE = "any other key"  # of a section that gathers them in `settings`


def rows(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """Yields a line for each key, in the order of the model. Raises LookupError if a key has no description."""
    told = descriptions(model)
    for name, field in model.model_fields.items():
        key = field.alias or name
        if name not in told:
            raise LookupError(
                f"{model.__module__}:{model.__name__}.{name} has no docstring below it"
            )
        shown = _BESIDE if name == "settings" else f"`{key}`"
        kind = _type(field.annotation, field.metadata)
        yield tuple(_cell(each) for each in (shown, kind, default(field), told[name]))  # type: ignore[misc]


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Returns {field: the docstring below it}; a class's own goes before its bases'."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _docstrings(base)
    return found


def reached(models: Iterable[type[BaseModel]]) -> set[type[BaseModel]]:
    """Returns the models, and all that their fields hold."""
    found: set[type[BaseModel]] = set()
    left = list(models)
    while left:
        model = left.pop()
        if model not in found:
            found.add(model)
            left += [
                each for field in model.model_fields.values() for each in _models(field.annotation)
            ]
    return found


def default(field: FieldInfo) -> str:
    """Returns a default as TOML has it, or a word."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "–" if value is None else f"`{_toml(value)}`"


@cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    tree = ast.parse(inspect.getsource(inspect.getmodule(model) or model))
    classes = [
        each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == model.__name__
    ]
    body = classes[0].body if classes else []
    found = {}
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = (
                below.value.value
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                else None
            )
            if isinstance(text, str):
                found[field.target.id] = " ".join(text.split()).replace("``", "`")
    return found


def _type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Says a type in words: ``list of positive whole numbers``."""
    extra = list(metadata)
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        extra += more
    said = next(
        (
            each.func.__doc__
            for each in extra
            if isinstance(each, AfterValidator) and each.func.__doc__
        ),
        None,
    )
    if said is not None:
        return str(said)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in args)
    if origin in (Union, types.UnionType):
        kinds = [each for each in args if each is not type(None)]
        if all(_models(each) for each in kinds) and len(kinds) > 1:
            return "table with a `kind`"
        *first, last = dict.fromkeys(_type(each, extra) for each in kinds)
        return f"{', '.join(first)} or {last}" if first else last
    if origin is tuple:
        item = _type(args[0])
        each = f"list of {_plural(item)}" if _plural(item) != item else f"list; each is {item}"
        return each if args[-1] is Ellipsis else f"{each}, {len(args)} of them"
    if origin is dict:
        return "table" if args[1] is Any else f"table {{name: {_type(args[1])}}}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return ", ".join(
        each for each in (_WORDS[annotation], _bounds(extra, annotation is int)) if each
    )


def _plural(text: str) -> str:
    for one, many in (
        ("whole number", "whole numbers"),
        ("number", "numbers"),
        ("table", "tables"),
        ("text", "texts"),
    ):
        if text.startswith(one):
            return many + text.removeprefix(one)
    return text


def _bounds(metadata: Iterable[Any], whole: bool) -> str:
    """Says bounds: ``above 0 to 1``, of whole numbers ``1 to 64``."""
    flat = [
        each
        for item in metadata
        for each in (item.metadata if isinstance(item, FieldInfo) else [item])
    ]
    low = high = ""
    for each in flat:
        if isinstance(each, Ge):
            low = _number(each.ge)
        elif isinstance(each, Gt):
            low = _number(each.gt + 1) if whole else f"above {_number(each.gt)}"  # type: ignore[operator]
        elif isinstance(each, Le):
            high = _number(each.le)
        elif isinstance(each, Lt):
            high = _number(each.lt - 1) if whole else f"below {_number(each.lt)}"  # type: ignore[operator]
    if low and high:
        return f"{low} to {high}"
    return low if low.startswith("above") else f"at least {low}" if low else ""


def _number(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}" if value < 2**53 else f"2^{value.bit_length()} - 1"
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True, exclude_none=True, by_alias=True)
    if isinstance(value, dict):
        inner = ", ".join(f"{key} = {_toml(each)}" for key, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(each) for each in value)}]"
    return (
        f"{value:g}"
        if isinstance(value, float)
        else f"{value:_}"
        if value >= 10_000
        else str(value)
    )


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Returns the models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [each for part in get_args(annotation) for each in _models(part)]


def _cell(text: str) -> str:
    """Returns text for a cell of a table in Markdown."""
    return text.replace("|", "\\|")
