"""``vfl predict``: predicts new rows with the models of a run, all parties in this process."""

from __future__ import annotations

from pathlib import Path

import click

from vfl.summary.run_argument import run_argument
from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES
from vfl_common.text import LINE, clean
from vfl_party.predict.options import result_options, without_option


@click.command(epilog=EXIT_CODES)
@run_argument
@click.option(
    "--data",
    multiple=True,
    metavar="NAME=SOURCE",
    help="Predict these rows of party NAME; repeat for each party.",
)
@click.option(
    "--query",
    multiple=True,
    metavar="NAME=SELECT",
    help="Select the new rows of NAME with this query (databases only).",
)
@without_option
@result_options
def predict(
    run: Path,
    data: tuple[str, ...],
    query: tuple[str, ...],
    without: tuple[str, ...],
    output: Path,
    like_input: bool,
    spreadsheet: bool,
    student: bool,
    replace: bool,
) -> None:
    """Predict rows with a run, all parties in this process.

    RUN is the folder of a run of `vfl simulate` or of the library. By default, it is the newest
    finished run of a federation (not of a baseline) in the folder runs. Without --data, the
    training run's own rows are predicted again. SOURCE is a file, or any other source that a party
    file may name. A database uses the query of training unless --query gives another query. SOURCE
    needs the columns that the party had in training, but no label. The result has a row for each
    row of the active party's table, in the same order, with the party's own ids. With --student,
    only the active party's rows are needed: the run's student scores them. Between organisations,
    every party runs `vfl-party predict`.

    \b
    Examples:
      vfl predict --out again.csv
      vfl predict runs/20260101-120000-churn-1f2e --data bank=new.csv --data shop=new-shop.parquet
    """
    from vfl.library.run import Run, predict_rows
    from vfl_common.production import scorings
    from vfl_common.run_folder import RunFolder
    from vfl_party.predict.results import Output

    training_run = Run.load(run)
    folder, output_settings = training_run.folder, Output(output, like_input, spreadsheet, replace)
    result = predict_rows(
        folder,
        parse_data_options(data) or None,
        output_settings,
        _parse_by_name(query, "--query", "SELECT"),
        without,
        solo=student,
    )
    active = next(party.name for party in training_run.summary.parties if party.role == "active")
    scorings.note(
        folder.resolve().parent,
        party=active,
        recipe=RunFolder(folder / active, folder.name).recipe().name,
        model=folder.resolve().name,
        run="",
        rows=result.rows.rows,
        scored=result.rows.written,
        output=str(output.absolute()),
    )
    for text in result.notes:
        click.echo(clean(text, LINE), err=True)
    click.echo(result.rows, err=True)
    # The meaning contains the name of a class, which comes from the table.
    click.echo(clean(result.meaning, LINE), err=True)
    click.echo(output)


def parse_data_options(data: tuple[str, ...]) -> dict[str, str]:
    """Parses the options ``--data NAME=SOURCE`` to {party: source}. Raises InputError."""
    from vfl_common.config.sources import is_path, split_member

    sources = _parse_by_name(data, "--data", "SOURCE")
    for name, file in sources.items():
        if is_path(file) and not Path(split_member(file)[0]).exists():
            raise InputError(
                Code.FILE_INVALID, f"--data {name}={file}: no such file. Correct the path."
            )
    return sources


def _parse_by_name(values: tuple[str, ...], option: str, what: str) -> dict[str, str]:
    """Parses an option ``NAME=…``, which may be given once for each party. Raises InputError."""
    from vfl_common.passwords import hide_passwords

    result = dict[str, str]()
    for value in values:
        name, _, text = value.partition("=")
        if not (name and text):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{option}: must be NAME={what} (got {hide_passwords(value)}). Give a party's "
                "name and its rows.",
            )
        if name in result:
            raise InputError(
                Code.CONFIG_INVALID, f"{option} {name}=…: is given twice. Give it once."
            )
        result[name] = text
    return result
