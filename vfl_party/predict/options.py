"""The options of the two commands that write scores, ``vfl predict`` and ``vfl-party predict``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

C = TypeVar("C", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--out",
        "output",
        default="predictions.csv",
        show_default=True,
        type=click.Path(path_type=Path),
        help="Where the active party writes ids, scores and classes; .csv or .parquet.",
    ),
    click.option(
        "--like-input",
        is_flag=True,
        help="CSV with the separator and the decimal sign of the active party's table.",
    ),
    click.option(
        "--spreadsheet",
        is_flag=True,
        help="CSV with ' before text that a spreadsheet would compute.",
    ),
    click.option(
        "--solo",
        is_flag=True,
        help="Score all rows of the active party with the run's student, without the others.",
    ),
    click.option(
        "--replace", is_flag=True, help="Replace a result of this name, once the new one is whole."
    ),
)


without_option = click.option(
    "--without",
    multiple=True,
    metavar="PARTY",
    help="A passive party that takes no part; once for each. The model must have learnt to do "
    "without one, unless it is of MocoSFL.",
)


def result_options(command: C) -> C:
    """Adds ``output``, ``like_input``, ``spreadsheet``, ``solo`` and ``replace``, in this order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
