"""The options of the two commands that write scores, ``vfl predict`` and ``vfl-party predict``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from vfl_common.process.program import flag_with_old_name

C = TypeVar("C", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--out",
        "output",
        default="predictions.csv",
        show_default=True,
        type=click.Path(path_type=Path),
        help="Write ids, scores and classes to this .csv or .parquet file.",
    ),
    click.option(
        "--like-input",
        is_flag=True,
        help="Write CSV with the active party's separator and decimal sign.",
    ),
    click.option(
        "--spreadsheet",
        is_flag=True,
        help="Put ' before text that a spreadsheet would treat as a formula.",
    ),
    flag_with_old_name(
        "--student",
        "--solo",
        "Score all rows with the run's student, without the other parties.",
    ),
    click.option(
        "--replace", is_flag=True, help="Replace an existing result once the new one is complete."
    ),
)


without_option = click.option(
    "--without",
    multiple=True,
    metavar="PARTY",
    help="Leave out a passive party; repeatable. The model must allow it.",
)


def result_options(command: C) -> C:
    """Adds the options that ``vfl predict`` and ``vfl-party predict`` share to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
