"""Warns the user of settings that can run but are perhaps not intended."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.text import format_percent, hide_passwords

log = logging.getLogger(__name__)

# With fewer training rows in all, or of a class, metrics depend on chance.
MIN_ROWS = 50
MIN_ROWS_OF_CLASS = 10


def warn_label_taken(name: str, data: DataSettings) -> str:
    """Returns a warning if a passive party's ``data.label`` removes a column from its features; ''
    if it does not.

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
    """Raises InputError if a passive party's data settings name columns that only the active party
    reads.

    In one file for all parties (``data.view``), these keys are allowed.
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


def warn_few_rows(rows: int, classes: int) -> str:
    """Returns a warning if there are too few training rows to train a model; '' if there are
    enough.

    The minimum is ``MIN_ROWS``, or ``MIN_ROWS_OF_CLASS`` times the number of classes if that is
    more. ``classes``: 0 for a regression.
    """
    min_rows = max(MIN_ROWS, MIN_ROWS_OF_CLASS * classes)
    if rows >= min_rows:
        return ""
    return (
        f"{rows:,} training rows: fewer than {min_rows:,} ({MIN_ROWS}, or {MIN_ROWS_OF_CLASS} for "
        "each class) teach a model little, and its metrics depend on chance"
    )


def warn_few_common(data: DataSettings, common: int, own: int) -> str:
    """Returns a warning if few of a party's ``own`` rows are common to all parties; '' if there are
    enough, or the party has no rows.
    """
    if common >= data.expect_common * own:
        return ""
    return (
        f"only {format_percent(common, own)} of the rows of {hide_passwords(data.source)} are "
        f"common to all parties, fewer than data.expect_common = {data.expect_common:g}; compare "
        "how ids look at every party (vfl-party check), or lower data.expect_common"
    )


def advise(show: Callable[..., None], text: str) -> None:
    """Logs ``text`` as a warning and shows it to the user. Does nothing if ``text`` is empty."""
    if text:
        log.warning("%s", text, extra={"event": "advice"})
        show("advice", said=text)


def check_spelling(recipe: Recipe, data: DataSettings) -> None:
    """Raises InputError if the recipe changes how ids are spelt and the active party draws label
    noise by id. Each other spelling would draw new noise, and the mean over many draws would reveal
    the labels.
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
