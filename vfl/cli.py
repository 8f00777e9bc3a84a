"""``vfl``: a federation on one machine, its certificates, its reports; new federations."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import click

from vfl.certs.commands import certs
from vfl.export.commands import export
from vfl.new.commands import new
from vfl.report.run_argument import RUNS, run_argument
from vfl.simulation.baselines import BASELINES
from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES, NAMES, run_program, stopping
from vfl_common.text import LINE, clean, to_json

DEMO = Path(__file__).with_name("demo.toml")

_out = click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=RUNS,
    show_default=True,
    help="Folder of runs; each run gets its own folder in it.",
)
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print summary.json as one line instead of the table."
)
_seed = click.option("--seed", type=click.IntRange(0), help="Replace the recipe's seed.")
_keep = click.option(
    "--keep-going", is_flag=True, help="Restart a party that was killed; it rejoins the run."
)


class _Commands(click.Group):
    """Adds the commands of the entry points ``vfl.commands``: each is imported when it is listed or
    called.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(each.name for each in _added())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        found = next((each for each in _added() if each.name == cmd_name), None)
        if found is None:
            return None
        try:
            command = found.load()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            text = (
                f"the command {cmd_name!r} of {found.value} cannot be loaded: {why}; reinstall "
                "or remove it"
            )
            raise InputError(Code.CONFIG_INVALID, text) from error
        if not isinstance(command, click.Command):
            text = (
                f"{found.value} is a {type(command).__name__}, and the entry point "
                "vfl.commands wants a click command"
            )
            raise InputError(Code.CONFIG_INVALID, text)
        return command


def _added() -> list[EntryPoint]:
    return list(entry_points(group="vfl.commands"))


@click.group(cls=_Commands, epilog=EXIT_CODES, context_settings=NAMES)
@click.version_option(package_name="vfl")
def cli() -> None:
    """Vertical federated learning: parties hold different columns about the same people and train
    together.

    This program runs whole federations on one machine, to try things out, and makes the files of a
    new one, its certificates and reports. Parties on separate machines use `vfl-server serve` and
    `vfl-party run`.

    \b
    Examples:
      vfl demo                              five processes learn digits, in about ten seconds
      vfl new recipe                        a recipe and a party file from your own table
      vfl simulate examples/diabetes.toml   run your own recipe
      vfl study examples/study/digits.toml  compare methods, seeds and label counts in a table
      vfl forecast examples/digits.toml     bytes and time, before anything runs
      vfl leaks examples/breast-cancer.toml what the others could read from what was sent
      vfl runs                              a table of your runs
      vfl report                            the newest run again, with charts
      vfl predict --data bank=new.csv --data shop=new-shop.csv
      vfl export tensorboard runs/20260101-120000-digits-1f2e
      vfl certs ca
    """


cli.add_command(certs)
cli.add_command(export)
cli.add_command(new)


@cli.command(epilog=EXIT_CODES)
@_out
@_json
@_seed
@_keep
def demo(out: Path, as_json: bool, seed: int | None, keep_going: bool) -> None:
    """Run a built-in federation: a server and four parties, as five processes with mutual TLS and
    real gRPC.

    Each party sees one quarter of scikit-learn's 8 x 8 pictures of digits; only the party `bank`
    knows the digits. The recipe is examples/digits.toml.

    \b
    Examples:
      vfl demo
      vfl demo --json | jq .metrics.test.accuracy
    """
    _simulate((DEMO,), out, as_json, seed, keep_going, None)


@cli.command(epilog=EXIT_CODES)
@click.argument(
    "files",
    metavar="RECIPE|PARTY-FILES...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@_out
@_json
@_seed
@_keep
@click.option(
    "--baseline",
    type=click.Choice(BASELINES),
    help="Run one party instead: the active one alone, all columns combined, or boosted trees "
    "over either. "
    "A single file may then be the active party's, for its own table.",
)
def simulate(
    files: tuple[Path, ...],
    out: Path,
    as_json: bool,
    seed: int | None,
    keep_going: bool,
    baseline: str | None,
) -> None:
    """Run the server and all parties of RECIPE as processes on this machine.

    The recipe's [simulate] table says where the parties' data come from: one data set divided by
    columns, quadrants or halves, or each party's own file. Instead of a recipe, give the party
    files of all its parties, to try them together before there are keys and a network: their data,
    encoders, devices and threads are used. Certificates come from an authority that is made for
    this run only.

    \b
    In OUT/<run id>/:
      summary.json   metrics, bytes, seconds
      federation/    certificates, party files, the recipe, as each party would have them on its own machine
      <party>/       metrics.jsonl, log.jsonl, ledger.json, checkpoints/, stderr

    \b
    Examples:
      vfl simulate examples/breast-cancer.toml
      vfl simulate recipe.toml --seed 7 --json | tail -n 1 > result.json
      vfl simulate recipe.toml --baseline combined    what would all columns in one place give?
      vfl simulate bank.toml ../shop/shop.toml        what do our tables give together?
      vfl simulate bank.toml --baseline alone         what does my own table give? (the active party's file)
    """  # noqa: E501
    _simulate(files, out, as_json, seed, keep_going, baseline)


@cli.command(epilog=EXIT_CODES)
@click.argument("study", type=click.Path(path_type=Path))
@_out
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Federations to run at once.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON lines instead of progress and table."
)
def study(study: Path, out: Path, jobs: int, as_json: bool) -> None:
    """Run methods x seeds x label counts, and compare them.

    STUDY is a TOML file that names a recipe, seeds, label counts, and methods with their phases
    (docs/how-to/results/study.md). Each run is a federation like those of `vfl simulate`. One
    pretraining serves all label counts. If the study is stopped or killed, the same command resumes
    it: finished runs are not repeated. A run that fails does not stop the others.

    \b
    In OUT/<study>/: a folder for each run, results.csv, results.png

    \b
    Example:
      vfl study examples/study/digits.toml
    """
    from vfl.studies.show import show_study

    show_study(study, out, jobs=jobs, as_json=as_json)


@cli.command(epilog=EXIT_CODES)
@click.argument("plan", metavar="RECIPE", type=click.Path(path_type=Path))
@click.option(
    "--bandwidth",
    default="100Mbit/s",
    show_default=True,
    help="Of each link: 10Mbit, 1Gbit/s, 100MB, …",
)
@click.option(
    "--latency",
    default="20ms",
    show_default=True,
    help="One way (half of ping's time): 20ms, 0.1s, …",
)
@click.option(
    "--rows",
    type=click.IntRange(1, 100_000_000),
    help="Rows that all parties hold, or each passive one if rows.align is none; if given, data "
    "are not read.",
)
@click.option(
    "--rounds",
    multiple=True,
    metavar="PHASE=N",
    help="Count N rounds for a phase with early stopping.",
)
@click.option(
    "--step-time", default="0", show_default=True, help="What a step of training computes: 1.5ms, …"
)
@click.option(
    "--measure", is_flag=True, help="Find out what a step computes: run a few in this process."
)
@click.option(
    "--cores",
    type=click.IntRange(1),
    help="Of the one machine that all parties share, as under vfl simulate.",
)
@click.option(
    "--suggest",
    is_flag=True,
    help="Try codecs and steps in flight for this link; nothing is changed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of the tables.")
def forecast(
    plan: Path,
    bandwidth: str,
    latency: str,
    rows: int | None,
    rounds: tuple[str, ...],
    step_time: str,
    measure: bool,
    cores: int | None,
    suggest: bool,
    as_json: bool,
) -> None:
    """Count, before anything runs, the bytes that RECIPE will send by party, phase and direction,
    and their time.

    RECIPE may also be a party file: its data then give the number of rows. Every message counts
    with its exact size. The sessions with the server are not counted because they grow with time.
    The time covers communication, and what --step-time or --measure say of computation.

    \b
    Examples:
      vfl forecast examples/digits.toml
      vfl forecast recipe.toml --rows 250000 --bandwidth 1Gbit/s --latency 5ms
      vfl forecast recipe.toml --bandwidth 10Mbit/s --latency 25ms --step-time 2ms --suggest
      vfl forecast bank.toml --json
    """
    from vfl.forecasting.network import Network
    from vfl.forecasting.show import show_forecast

    if measure and step_time != "0":
        raise InputError(
            Code.CONFIG_INVALID, "--step-time and --measure say the same thing; give one of them"
        )
    if cores is not None and not measure:
        raise InputError(
            Code.CONFIG_INVALID, "--cores needs --measure, which finds out what all parties compute"
        )
    network = Network.read(bandwidth, latency, step_time, cores)
    show_forecast(
        plan, network, rows=rows, rounds=rounds, as_json=as_json, measure=measure, suggest=suggest
    )


@cli.command(epilog=EXIT_CODES)
@run_argument
def report(run: Path) -> None:
    """Print the table of RUN again, and draw its learning curves and bytes as PNG into its folder.

    RUN is the folder of a run, or a party's folder in it, or its summary.json; if it is left out,
    the newest finished run of a federation, not of a baseline, in the folder runs. A passive party
    gets no summary, and nobody has one before the run ends: the table shows the party's own counts.

    \b
    Example:
      vfl report runs/20260101-120000-digits-1f2e
    """
    from vfl.report.charts import draw
    from vfl.report.reading import find, importance, initial, own_notes
    from vfl.report.table import show, show_own

    own = own_notes(run)
    if own is not None:
        show_own(own)
        for line in [*importance(run), *initial(run)]:
            click.echo(line)
        if own.goes_on:
            click.echo(f"{run}: {own.end.said}")
        if own.role == "passive":
            click.echo(
                f"{run}: a passive party has no summary of the run; the server and the "
                "active party do"
            )
        else:
            click.echo(
                f"{run}: "
                f"{'its summary comes at the end' if own.goes_on else 'its summary.json is missing'}"  # noqa: E501
            )
        return
    found = find(run)
    show(found.summary, found.phases)
    for line in [*importance(run), *initial(run)]:
        click.echo(line)
    paths = draw(found)
    for path in paths:
        click.echo(path)
    if not any(path.name == "learning-curves.png" for path in paths):
        click.echo(
            "no learning curves: no metrics.jsonl in this folder has more than one round to draw"
        )


@cli.command(epilog=EXIT_CODES)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=RUNS,
    show_default=True,
    help="Folder of runs.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON line for each run instead of the table."
)
def runs(out: Path, as_json: bool) -> None:
    """List the runs in OUT, the newest first.

    A run is finished; or failed or stopped, if the log of one of its processes ends so; else
    unfinished: it runs now, or was killed. A study's runs are listed with --out OUT/STUDY.

    \b
    Examples:
      vfl runs
      vfl runs --json | jq -r 'select(.state == "finished") | .folder'
    """
    from vfl.report.runs import find_runs, show_runs

    found, others = find_runs(out)
    if as_json:
        for each in found:
            click.echo(to_json(each.as_json(), compact=True))
    else:
        show_runs(found, others)


@cli.command(epilog=EXIT_CODES)
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
@click.option(
    "--out",
    "output",
    default="predictions.csv",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where to write ids, scores and classes; .csv or .parquet.",
)
@click.option(
    "--like-input",
    is_flag=True,
    help="CSV with the separator and the decimal sign of the active party's table.",
)
@click.option(
    "--spreadsheet", is_flag=True, help="CSV with ' before text that a spreadsheet would compute."
)
def predict(
    run: Path,
    data: tuple[str, ...],
    query: tuple[str, ...],
    output: Path,
    like_input: bool,
    spreadsheet: bool,
) -> None:
    """Predict with a run of `vfl simulate`, or of the library, on this machine, with all parties in
    this process.

    RUN is the folder of a run; if it is left out, the newest finished run of a federation, not of a
    baseline, in the folder runs. Without --data the run's own rows are predicted again. SOURCE is a
    file, or whatever else a party file may name; of a database the query of training is asked, if
    --query gives no other. It needs the columns that the party had in training, and no label. The
    result has a row for each row of the active party's table, in its order, with its own ids.
    Between organisations, every party runs `vfl-party predict`.

    \b
    Examples:
      vfl predict --out again.csv
      vfl predict runs/20260101-120000-churn-1f2e --data bank=new.csv --data shop=new-shop.parquet
    """
    from vfl.library.predicting import predict_rows
    from vfl.library.run import Run
    from vfl_party.predict.results import Output

    folder, written = Run.load(run).folder, Output(output, like_input, spreadsheet)
    found = predict_rows(
        folder, _by_party(data) or None, written, _named(query, "--query", "SELECT")
    )
    for text in found.notes:
        click.echo(clean(text, LINE), err=True)
    click.echo(found.rows, err=True)
    # It names a class, as the table has it.
    click.echo(clean(found.meaning, LINE), err=True)
    click.echo(output)


def _by_party(data: tuple[str, ...]) -> dict[str, str]:
    """Reads the options ``NAME=SOURCE``. Raises InputError."""
    from vfl_common.config.data import is_path

    found = _named(data, "--data", "SOURCE")
    for name, file in found.items():
        if is_path(file) and not Path(file).exists():
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


def _simulate(
    files: tuple[Path, ...],
    out: Path,
    as_json: bool,
    seed: int | None,
    keep_going: bool,
    baseline: str | None,
) -> None:
    from vfl.simulation.run import simulate as run

    with stopping("the same command begins a new run"):
        folder = run(
            files[0], out, others=files[1:], seed=seed, keep_going=keep_going, baseline=baseline
        )
    if as_json:
        import json

        click.echo(to_json(json.loads((folder / "summary.json").read_bytes()), compact=True))
        return
    from vfl.report.reading import find
    from vfl.report.table import show

    found = find(folder)
    show(found.summary, found.phases)
    click.echo(f"Learning curves, bytes and times of a step as PNG: vfl report {folder}")


def main() -> None:
    run_program(cli, "vfl")


if __name__ == "__main__":
    main()
