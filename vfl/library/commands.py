"""``vfl predict``: the joint prediction of new rows with a run."""

from __future__ import annotations

from pathlib import Path

import click

from vfl.report.run_argument import run_argument
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
    help="New rows of the party NAME; once for each party with features.",
)
@click.option(
    "--query",
    multiple=True,
    metavar="NAME=SELECT",
    help="The new rows of the party NAME, if its source is a database.",
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
    solo: bool,
    replace: bool,
) -> None:
    """Predict with a run of `vfl simulate`, or of the library, on this machine, with all parties in
    this process.

    RUN is the folder of a run; if it is left out, the newest finished run of a federation, not of a
    baseline, in the folder runs. Without --data the run's own rows are predicted again. SOURCE is a
    file, or whatever else a party file may name; of a database the query of training is asked, if
    --query gives no other. It needs the columns that the party had in training, and no label. The
    result has a row for each row of the active party's table, in its order, with its own ids.
    With --solo only the active party's rows are wanted: the student of the run scores them. Between
    organisations, every party runs `vfl-party predict`.

    \b
    Examples:
      vfl predict --out again.csv
      vfl predict runs/20260101-120000-churn-1f2e --data bank=new.csv --data shop=new-shop.parquet
    """
    from vfl.library.predicting import predict_rows
    from vfl.library.run import Run
    from vfl_common.production import scorings
    from vfl_common.run_folder import RunFolder
    from vfl_party.predict.results import Output

    whole = Run.load(run)
    folder, written = whole.folder, Output(output, like_input, spreadsheet, replace)
    found = predict_rows(
        folder,
        by_party(data) or None,
        written,
        _named(query, "--query", "SELECT"),
        without,
        solo=solo,
    )
    active = next(each.name for each in whole.summary.parties if each.role == "active")
    scorings.note(
        folder.resolve().parent,
        party=active,
        recipe=RunFolder(folder / active, folder.name).recipe().name,
        model=folder.resolve().name,
        run="",
        rows=found.rows.rows,
        scored=found.rows.written,
        output=str(output.absolute()),
    )
    for text in found.notes:
        click.echo(clean(text, LINE), err=True)
    click.echo(found.rows, err=True)
    # It names a class, as the table has it.
    click.echo(clean(found.meaning, LINE), err=True)
    click.echo(output)


def by_party(data: tuple[str, ...]) -> dict[str, str]:
    """Reads the options ``NAME=SOURCE``. Raises InputError."""
    from vfl_common.config.sources import divided, is_path

    found = _named(data, "--data", "SOURCE")
    for name, file in found.items():
        if is_path(file) and not Path(divided(file)[0]).exists():
            raise InputError(Code.FILE_INVALID, f"--data {name}={file}: no such file")
    return found


def _named(given: tuple[str, ...], option: str, what: str) -> dict[str, str]:
    """Reads an option ``NAME=…`` that may be given once for each party. Raises InputError."""
    from vfl_common.config.data import shown

    found = dict[str, str]()
    for each in given:
        name, _, text = each.partition("=")
        if not (name and text):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{option} {shown(each)}: give NAME={what}, a party's name and its rows",
            )
        if name in found:
            raise InputError(Code.CONFIG_INVALID, f"{option} {name}=…: is given twice; give one")
        found[name] = text
    return found
