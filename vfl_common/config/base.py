"""The base of every section of a TOML file: frozen, strict about keys, errors in one sentence."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from vfl_common.errors import Code, InputError

S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """A table of a TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for key in value:
                if key not in known:
                    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
                    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
                    raise ValueError(f"unknown key {key!r}; {hint}")
        return value


def read_toml(path: Path) -> dict[str, Any]:
    """Reads the tables of a TOML file. Raises InputError if it is missing or is not TOML."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise InputError(Code.FILE_INVALID, f"{path}: no such file") from None
    except OSError as error:
        raise InputError(Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError is a ValueError
        raise InputError(Code.CONFIG_INVALID, f"{path}: is not valid TOML: {error}") from None


def parse(model: type[S], value: Any, where: str) -> S:
    """Returns ``value`` as ``model``. Raises InputError with the first mistake: ``where: key: what``."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] == "union_tag_invalid":
            known = [tag.strip(" '") for tag in str(first["ctx"]["expected_tags"]).split(",")]
            near = difflib.get_close_matches(str(first["ctx"]["tag"]), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known kinds: {', '.join(known)}"
            what = f"there is no kind {first['ctx']['tag']!r}; {hint}"
        raise InputError(Code.CONFIG_INVALID, f"{where}: {key + ': ' if key else ''}{what}") from None
