"""The table of the levels of a policy."""

from __future__ import annotations

from typing import Any, get_args

from scripts.reference.pages import table
from vfl_common.config.policy import ELSEWHERE, LEVELS, Level, PolicySettings


def levels() -> str:
    """Returns a row for each key that a level sets, in ``[policy]`` and in other tables."""
    names = get_args(Level)
    keys = [key for key in PolicySettings.model_fields if any(key in LEVELS[of] for of in names)]
    rows = [[f"`{key}`", *(_said(LEVELS[of].get(key)) for of in names)] for key in keys]
    tables = dict.fromkeys(each for of in names for each in ELSEWHERE[of])
    for name in tables:
        keys = list(dict.fromkeys(key for of in names for key in ELSEWHERE[of].get(name, {})))
        rows += [
            [f"`{name}.{key}`", *(_said(ELSEWHERE[of].get(name, {}).get(key)) for of in names)]
            for key in keys
        ]
    return table(["key", *(f"`{each}`" for each in names)], rows)


def _said(value: Any) -> str:
    if value is None:
        return "–"
    if value == []:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else ", ".join(value)
