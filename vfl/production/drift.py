"""Finds what ``vfl drift`` compares: a party's run, and how its new rows are read."""

from __future__ import annotations

import contextlib
from pathlib import Path

from vfl.simulation.origin import Origin
from vfl_common.config.data import DataSettings
from vfl_common.config.party import load_party
from vfl_common.errors import Code, InputError
from vfl_party.predict.prediction import load_trained
from vfl_party.predict.trained import choose_run
from vfl_party.production.input_drift import Shift, input_drift, score_drift


def drifts(
    run: Path,
    data: str | None,
    query: str | None,
    party: str | None,
    read_as: Path | None,
    scores: Path | None,
) -> list[Shift]:
    """Returns the shift of each column, then of each score; see ``vfl drift``.

    Raises InputError.
    """
    if data is None and read_as is None and scores is None:
        raise InputError(
            Code.CONFIG_INVALID,
            "drift: no new rows are given. Give --data or --read-as, or scores with --scores.",
        )
    settings: DataSettings | None = None
    if read_as is not None:
        file = load_party(read_as)
        settings, party = file.data, party or file.name
    folder, name = choose_run(run, party)
    trained = load_trained(folder, name)
    if settings is None:
        # Only a run on one machine has this file.
        with contextlib.suppress(InputError):
            settings = Origin.of(folder).parts().get(name)
    shifts: list[Shift] = []
    if data is not None or read_as is not None:
        if trained.state["preprocessor"] is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{folder}: {name} has labels only, so no column can drift. Give --scores, or "
                "another --party.",
            )
        if settings is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{folder}: does not say how to read the rows of {name}. Give its party file with "
                "--read-as.",
            )
        shifts += input_drift(trained, settings, data, query)
    if scores is not None:
        shifts += score_drift(trained, scores)
    return shifts
