"""Computes and prints the drift of a party's columns and scores, for ``vfl drift``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.text import Text

from vfl.simulation.federation import Origin
from vfl.summary.table import new_table, wide_console
from vfl_common.config.data import DataSettings
from vfl_common.config.party import load_party
from vfl_common.errors import Code, InputError
from vfl_common.text import clean
from vfl_party.predict.input_drift import DRIFTED, MOVED, Shift, input_drift, score_drift
from vfl_party.predict.run import load_trained
from vfl_party.predict.trained import choose_run

# The maximum number of characters of a column's name in a table.
_MAX_CHARACTERS = 60


def compute_drift(
    run: Path,
    data: str | None,
    query: str | None,
    party: str | None,
    read_as: Path | None,
    scores: Path | None,
) -> list[Shift]:
    """Computes the shift of each column, then of each score. The arguments are those of ``vfl
    drift``.

    Raises InputError.
    """
    if data is None and read_as is None and scores is None:
        raise InputError(
            Code.CONFIG_INVALID,
            "drift: needs new rows or scores. Give --data, --read-as or --scores.",
        )
    settings: DataSettings | None = None
    if read_as is not None:
        party_file = load_party(read_as)
        settings, party = party_file.data, party or party_file.name
    folder, name = choose_run(run, party)
    trained = load_trained(folder, name)
    if settings is None:
        # The file exists only if all parties of the run were on this machine.
        with contextlib.suppress(InputError):
            settings = Origin.of(folder).parts().get(name)
    shifts: list[Shift] = []
    if data is not None or read_as is not None:
        if trained.state["preprocessor"] is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{folder}: {name} has no columns but the label. Give --scores, or another "
                "--party.",
            )
        if settings is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{folder}: lacks the settings to read rows of {name}. Give the party file with "
                "--read-as.",
            )
        shifts += input_drift(trained, settings, data, query)
    if scores is not None:
        shifts += score_drift(trained, scores)
    return shifts


def show_drift(shifts: Sequence[Shift]) -> None:
    """Prints the stability index of each column, and the numbers of drifted and moved columns."""
    table = new_table("Population stability index of each column")
    table.add_column("column", no_wrap=True)
    table.add_column("PSI index", justify="right")
    table.add_column("by chance up to", justify="right")
    table.add_column("verdict")
    for shift in shifts:
        numbers = (f"{shift.index:.3f}", f"{shift.chance:.3f}")
        table.add_row(clean(shift.name, _MAX_CHARACTERS), *numbers, shift.verdict)
    counts = {word: sum(shift.verdict == word for shift in shifts) for word in ("drifted", "moved")}
    summary = f"columns: {len(shifts)}; drifted: {counts['drifted']}; moved: {counts['moved']}"
    limits = f"moved: from {MOVED:g}; drifted: from {DRIFTED:g}; both only beyond chance"
    wide_console().print(Group(table, Text(""), Text(summary), Text(limits, "dim")))
