"""Notes for a person: what can be run, and is perhaps not meant."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.passwords import hide_passwords
from vfl_common.text import percent

log = logging.getLogger(__name__)

# With fewer training rows, metrics depend on chance.
MIN_ROWS = 50
MIN_ROWS_OF_CLASS = 10


def label_taken(name: str, data: DataSettings) -> str:
    """Words that a passive party's ``data.label`` keeps a column out of its features; '' if it does
    not.

    The label of a named set is not a column, and in one file for all parties (``data.view``) the
    label is expected.
    """
    if data.label is None or data.is_named or data.view is not None:
        return ""
    return (
        f"{name} is passive: data.label = {data.label!r} takes that column out of its features; "
        "use data.drop for that, or remove data.label"
    )


def check_roles(name: str, data: DataSettings) -> None:
    """Raises InputError if a passive party's data name columns that only the active party reads.

    One file for all parties (``data.view``) has the keys of all.
    """
    if data.view is not None:
        return
    for key in ("labels", "event", "weight", "group"):
        if getattr(data, key):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{hide_passwords(data.source)}: data.{key}: only the active party reads it, and "
                f"{name} is passive. Remove it, and name columns that are not features in "
                "data.drop.",
            )


def few_rows(rows: int, classes: int) -> str:
    """Words that so few training rows teach a model little; '' if they are enough.

    Enough are ``MIN_ROWS``, and ``MIN_ROWS_OF_CLASS`` times the number of classes, which is 0 for
    a regression.
    """
    min_rows = max(MIN_ROWS, MIN_ROWS_OF_CLASS * classes)
    if rows >= min_rows:
        return ""
    return (
        f"{rows:,} training rows: fewer than {min_rows:,} ({MIN_ROWS}, or {MIN_ROWS_OF_CLASS} for "
        "each class) teach a model little, and its metrics depend on chance"
    )


def few_common(data: DataSettings, common: int, own: int) -> str:
    """Words that few of a party's ``own`` rows are common to all parties; '' if they are enough, or
    it has none.
    """
    if common >= data.expect_common * own:
        return ""
    return (
        f"only {percent(common, own)} of the rows of {hide_passwords(data.source)} are common to "
        f"all parties, fewer than data.expect_common = {data.expect_common:g}; compare how ids "
        "look at every party (vfl-party check), or lower the key"
    )


def advise(show: Callable[..., None], text: str) -> None:
    """Puts a note into the log, and shows it to the person in front of the party; nothing if it is
    ''.
    """
    if text:
        log.warning("%s", text, extra={"event": "advice"})
        show("advice", said=text)


def check_spelling(recipe: Recipe, data: DataSettings) -> None:
    """Raises InputError if the recipe spells ids by which the active party draws noise on labels:
    each other spelling would draw it again, and the mean of the draws tells the labels.
    """
    if recipe.task.label_epsilon is None or not data.spelt_by_recipe:
        return
    rules = ", ".join(f'"{rule}"' for rule in recipe.rows.id_rules)
    raise InputError(
        Code.REFUSED,
        f"{hide_passwords(data.source)}: task.label_epsilon draws the noise of a label by its "
        f"id, and this recipe changes how ids are spelt (got rows.id_rules = [{rules}]). Write "
        f"data.id_rules = [{rules}] in the party file.",
    )
